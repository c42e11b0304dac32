"""What attention kernels, compiling, checkpointing and offload are worth on a GPU: speed, memory, exactness.

    python benchmarks/trainer/gpu_paths.py [--tokens 16384] [--steps 3]

A model of Qwen3-0.6B's sizes with random weights computes logprobs in bfloat16 and runs backward, over a row that is
one sequence, one of mixed lengths, and one of groups that share their prompts. `error` is the largest difference
of a logprob from float32 with `sdpa`; `first` is the first step, compiling included. Then rows of twelve lengths run
through one compiled model: how many programs of a layer that takes (at best two), and the slowest step after those.
Whole training steps are measured by `gpu.py`.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from headrace.trainer.memory_plan import MODES, RecomputeMode
from headrace.trainer.model import PackedModel
from headrace.trainer.packed_row import Kernel, PackedRow

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Way:
    """One way to compute."""

    attention: Kernel
    compiled: bool = False
    checkpointing: RecomputeMode = False
    offload: bool = False
    fp32_head: bool = False

    def __str__(self) -> str:
        parts = [self.attention, "compiled" * self.compiled, self.checkpointing, "offload" * self.offload]
        return ", ".join(part for part in [*parts, "fp32 head" * self.fp32_head] if part)


KERNELS: dict[str, tuple[Kernel, ...]] = {"one": ("flash", "cudnn"), "mixed": ("flash",), "groups": ("flash",)}


def ways(row: str) -> Iterator[Way]:
    for checkpointing in reversed(MODES):
        yield Way("sdpa", False, checkpointing)
        for kernel in KERNELS[row]:
            yield Way(kernel, False, checkpointing)
            yield Way(kernel, True, checkpointing)
    if row == "one":
        yield Way("cudnn", False, "full", offload=True)
        yield Way("cudnn", True, "full", offload=True)
        yield Way("cudnn", True, "selective", offload=True)
        yield Way("cudnn", True, "full", fp32_head=True)


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


def write_model(directory: Path) -> None:
    torch.manual_seed(0)
    with DEVICE:
        AutoModelForCausalLM.from_config(qwen3_600m(), dtype=torch.bfloat16).save_pretrained(directory)


def model_of(directory: Path, way: Way, dtype: torch.dtype = torch.bfloat16) -> PackedModel:
    """A model that computes in this way; what the one before had is free again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return PackedModel(
        directory,
        dtype=dtype,
        attention=way.attention,
        activation_checkpointing=way.checkpointing,
        activation_offload=way.offload,
        compile=way.compiled,
        lm_head_fp32=way.fp32_head,
    )


def logprobs(model: PackedModel, row: PackedRow) -> Tensor:
    """Of a random label for each place."""
    places = 1 + max(int(each.max()) for each in row.places)  # what comes behind is padding
    labels = torch.randint(0, 150_000, (places,), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    predictors = torch.arange(places, device=DEVICE)
    return model.score(row, predictors, labels, torch.ones(places, device=DEVICE)).logprobs


def step(model: PackedModel, row: PackedRow) -> Tensor:
    given = logprobs(model, row)
    given.mean().backward()  # type: ignore[no-untyped-call]
    model.module.zero_grad(set_to_none=True)
    return given.detach()


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


def seconds(model: PackedModel, row: PackedRow) -> float:
    """For one step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    step(model, row)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def exact_logprobs(directory: Path, given: list[np.ndarray]) -> Tensor:
    model = model_of(directory, Way("sdpa"), torch.float32)
    with torch.no_grad():
        return logprobs(model, model.pack_row(given))


def measure(directory: Path, way: Way, given: list[np.ndarray], exact: Tensor, steps: int) -> str:
    """A line of the table."""
    model = model_of(directory, way)
    row = model.pack_row(given)
    first = seconds(model, row)
    torch.cuda.reset_peak_memory_stats()
    taken = sorted(seconds(model, row) for _ in range(steps))
    peak = torch.cuda.max_memory_allocated() / 2**30
    error = float((step(model, row) - exact).abs().max())
    return f"{way!s:<40}{len(exact) / taken[steps // 2]:>9.0f}{peak:>7.1f}{error:>8.3f}{first:>6.1f}s"


def compare_ways(directory: Path, name: str, tokens: int, steps: int) -> None:
    given = sequences(name, tokens)
    exact = exact_logprobs(directory, given)
    title = f"{name}: {len(given)} sequences, {len(exact)} tokens"
    print(f"\n{title:<40}{'tokens/s':>9}{'GiB':>7}{'error':>8}{'first':>7}")
    for way in ways(name):
        print(measure(directory, way, given, exact, steps), flush=True)


def compare_lengths(directory: Path, tokens: int) -> None:
    model = model_of(directory, Way("cudnn", compiled=True))
    lengths = [tokens - 1 - tokens * part // 160 for part in range(12)]
    taken = [seconds(model, model.pack_row(sequences("one", length))) for length in lengths]
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
        directory = Path(temporary)
        write_model(directory)
        for name in ("one", "mixed", "groups"):
            compare_ways(directory, name, arguments.tokens, arguments.steps)
        compare_lengths(directory, arguments.tokens)


if __name__ == "__main__":
    main()
