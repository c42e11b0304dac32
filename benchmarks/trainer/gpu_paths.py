"""What attention kernels, compiling, checkpointing and offload are worth on a GPU: speed, memory, exactness.

    python benchmarks/trainer/gpu_paths.py [--tokens 16384] [--steps 3]

A model of Qwen3-0.6B's sizes with random weights computes logprobs in bfloat16 and runs backward, over a row that is
one sequence, one of mixed lengths, and one of groups that share their prompts. `error` is the largest difference
of a logprob from float32 with `sdpa`; `first` is the first step, compiling included. Then rows of twelve lengths run
through one compiled model: how many programs that takes, and the slowest step once there are two.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from headrace.trainer.compiling import compile_layers
from headrace.trainer.lm_head import label_logprobs
from headrace.trainer.memory import checkpoint_layers, offload_activations
from headrace.trainer.model import PackedModel, hidden_states
from headrace.trainer.row import Kernel, Row, make_row

DEVICE = torch.device("cuda")
LM_HEAD_CHUNK = 4096


@dataclass(frozen=True)
class Way:
    """One way to compute."""

    attention: Kernel
    compiled: bool = False
    checkpointing: str = ""
    offload: bool = False
    fp32_head: bool = False

    def __str__(self) -> str:
        parts = [self.attention, "compiled" if self.compiled else "", self.checkpointing]
        return ", ".join(filter(None, [*parts, "offload" * self.offload, "fp32 head" * self.fp32_head]))


def ways(row: str) -> Iterator[Way]:
    kernels: dict[str, tuple[Kernel, ...]] = {"one": ("flash", "cudnn", "varlen"), "mixed": ("auto",), "groups": ()}
    for checkpointing in ("", "full", "selective"):
        yield Way("sdpa", checkpointing=checkpointing)
        for kernel in kernels[row]:
            yield Way(kernel, False, checkpointing)
            yield Way(kernel, True, checkpointing)
        if row == "groups":
            yield Way("auto", False, checkpointing)
    if row == "one":
        yield Way("auto", False, "full", offload=True)
        yield Way("auto", True, "full", offload=True)
        yield Way("auto", True, "selective", offload=True)
        yield Way("auto", True, "full", fp32_head=True)


def sequences(row: str, tokens: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)

    def text(length: int) -> np.ndarray:
        return rng.integers(0, 150_000, length)

    if row == "one":
        return [text(tokens)]
    if row == "groups":
        prompts = [text(tokens // 16) for _ in range(4)]
        return [
            np.concatenate([p, text(int(rng.integers(tokens // 64, tokens // 24)))]) for p in prompts for _ in "12345"
        ]
    cuts = np.cumsum(rng.integers(tokens // 128, tokens // 4, 64))
    return np.split(text(tokens), cuts[cuts < tokens])


class Bench:
    """One model, wrapped and unwrapped for each way."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        with DEVICE:
            made = AutoModelForCausalLM.from_config(qwen3_600m())
        made.save_pretrained(directory)
        self.model = PackedModel(directory, dtype=torch.bfloat16)
        self.layers = self.model.module.model.layers

    def wrap(self, way: Way) -> None:
        for layer in self.layers:
            vars(layer).pop("forward", None)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if way.checkpointing == "full" or way.checkpointing == "selective":
            checkpoint_layers(self.layers, way.checkpointing)
        if way.compiled:
            compile_layers(self.layers)
        if way.offload:
            offload_activations(self.layers)

    def logprobs(self, row: Row, way: Way, dtype: torch.dtype) -> Tensor:
        """Of a random label for each place."""
        places = row.token_ids.shape[1]
        labels = torch.randint(0, 150_000, (places,), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return label_logprobs(
                hidden_states(self.model.module, row).to(dtype),
                self.model.module.get_output_embeddings().weight,
                labels,
                torch.ones(places, device=DEVICE),
                LM_HEAD_CHUNK,
                fp32=way.fp32_head,
                compiled=way.compiled,
            )[0]

    def step(self, row: Row, way: Way) -> Tensor:
        logprobs = self.logprobs(row, way, torch.bfloat16)
        logprobs.mean().backward()  # type: ignore[no-untyped-call]
        self.model.module.zero_grad(set_to_none=True)
        return logprobs.detach()


def qwen3_600m() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )


def seconds(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def compare_ways(bench: Bench, row_name: str, tokens: int, steps: int) -> None:
    given = sequences(row_name, tokens)
    reference = Way("sdpa")
    bench.wrap(reference)
    with torch.no_grad():
        exact = bench.logprobs(make_row(given, DEVICE, "sdpa"), reference, torch.float32)
    title = f"{row_name}: {len(given)} sequences, {len(exact)} tokens"
    print(f"\n{title:<40}{'tokens/s':>9}{'GiB':>7}{'error':>8}{'first':>7}")
    for way in ways(row_name):
        bench.wrap(way)
        row = make_row(given, DEVICE, way.attention)
        torch.cuda.empty_cache()
        first = seconds(lambda way=way, row=row: bench.step(row, way))
        torch.cuda.reset_peak_memory_stats()
        taken = sorted(seconds(lambda way=way, row=row: bench.step(row, way)) for _ in range(steps))
        peak = torch.cuda.max_memory_allocated() / 2**30
        error = float((bench.step(row, way) - exact).abs().max())
        print(f"{way!s:<40}{len(exact) / taken[steps // 2]:>9.0f}{peak:>7.1f}{error:>8.3f}{first:>6.1f}s", flush=True)


def compare_lengths(bench: Bench, tokens: int) -> None:
    way = Way("auto", compiled=True)
    bench.wrap(way)
    taken: list[float] = []
    for part in range(12):
        row = make_row(sequences("one", tokens - 1 - 101 * part), DEVICE, "auto")
        taken.append(seconds(lambda row=row: bench.step(row, way)))
    programs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"\ntwelve lengths: {programs} programs; fastest step {min(taken):.2f} s, slowest of the last ten", end=" ")
    print(f"{max(taken[2:]):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(Path(temporary))
        for row in ("one", "mixed", "groups"):
            compare_ways(bench, row, arguments.tokens, arguments.steps)
        compare_lengths(bench, arguments.tokens)


if __name__ == "__main__":
    main()
