"""Tokens per second of the packed training step beside a plain padded Hugging Face loop, on the same data.

    python benchmarks/trainer/cpu.py [--threads 1] [--repeats 7]

Both train the tiny model by cross-entropy on the same tokens with the same optimizer settings. The plain loop pads
batches of 32 sequences, as they come, masks the padding, and accumulates gradients over the batches. Tokens are those
of the data: neither padding nor sharing changes the count. `padding` is how many tokens the plain loop computes for
each of them. The two take turns and medians are shown; the last column is by CPU time, which holds still on a busy
machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.rollout.packing import pack
from headrace.rollout.types import NOT_SAMPLED, Sample
from headrace.trainer.loss import ce_loss
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer
from headrace.trainer.step import TrainStep
from headrace.trainer.tiny import write_tiny_model

PADDED_BATCH = 32


def sample_of(prompt: np.ndarray, completion: np.ndarray) -> Sample:
    tokens = np.concatenate([prompt, completion])
    learned = np.arange(len(tokens)) >= len(prompt)
    sample = Sample(tokens, learned, np.zeros(len(tokens)), np.full(len(tokens), NOT_SAMPLED), len(prompt))
    sample.set_stream("ce_weights", learned.astype(np.float32))
    sample.set_stream("rl_weights", np.zeros(len(tokens), np.float32))
    return sample


def workloads() -> dict[str, list[Sample]]:
    rng = np.random.default_rng(0)

    def text(low: int, high: int) -> np.ndarray:
        return rng.integers(0, 256, rng.integers(low, high + 1))

    def long_tailed() -> Sample:
        """Lognormal lengths, as chats have them: the median is 64, one in twenty is above 240."""
        length = int(np.clip(np.exp(rng.normal(np.log(64), 0.8)), 12, 512))
        return sample_of(text(length // 3, length // 3), text(length - length // 3, length - length // 3))

    groups = [(text(15, 21), [text(5, 9) for _ in range(8)]) for _ in range(32)]
    return {
        "32 prompts x 8 short answers": [sample_of(prompt, answer) for prompt, answers in groups for answer in answers],
        "64 short chats": [sample_of(text(15, 21), text(5, 9)) for _ in range(64)],
        "64 mixed lengths, 16 to 256": [sample_of(text(8, 64), text(8, 192)) for _ in range(64)],
        "64 mixed lengths, long tail": [long_tailed() for _ in range(64)],
    }


def packed_step(directory: Path, samples: list[Sample]) -> Callable[[], object]:
    model = PackedModel(directory)
    step = TrainStep(model, Optimizer(model.named_parameters()), {"ce": ce_loss})
    return lambda: step.run(pack(samples, 512), lr=1e-4)


def padded_batches(samples: list[Sample]) -> list[list[Sample]]:
    return [samples[start : start + PADDED_BATCH] for start in range(0, len(samples), PADDED_BATCH)]


def padded_tokens(samples: list[Sample]) -> int:
    return sum(len(batch) * max(map(len, batch)) for batch in padded_batches(samples))


def padded_loop(directory: Path, samples: list[Sample]) -> Callable[[], object]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    learned = sum(int(sample.mask.sum()) for sample in samples)

    def step() -> None:
        for batch in padded_batches(samples):
            width = max(len(sample) for sample in batch)
            ids, labels, mask = (torch.full((len(batch), width), fill) for fill in (0, -100, 0))
            for line, sample in enumerate(batch):
                tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
                ids[line, : len(sample)] = tokens
                mask[line, : len(sample)] = 1
                labels[line, : len(sample)] = tokens.where(torch.from_numpy(sample.mask), -100)
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / learned
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(steps: list[Callable[[], object]], repeats: int) -> tuple[list[float], list[float]]:
    """Median seconds of each step, by the clock and of the CPU; they take turns, so that all see the same machine."""
    for step in steps:
        step()
    clock: list[list[float]] = [[] for _ in steps]
    cpu: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats):
        for number, step in enumerate(steps):
            started = time.perf_counter(), time.process_time()
            step()
            clock[number].append(time.perf_counter() - started[0])
            cpu[number].append(time.process_time() - started[1])
    return [statistics.median(times) for times in clock], [statistics.median(times) for times in cpu]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        write_tiny_model(directory)
        title = f"tokens/s on {arguments.threads} thread(s)"
        print(f"{title:<30}{'tokens':>8}{'padding':>9}{'padded':>8}{'packed':>8}{'ratio':>7}{'by CPU time':>13}")
        for name, samples in workloads().items():
            tokens = sum(len(sample) for sample in samples)
            steps = [make(directory, samples) for make in (padded_loop, packed_step)]
            (padded, packed), (padded_cpu, packed_cpu) = measure(steps, arguments.repeats)
            print(
                f"{name:<30}{tokens:>8}{padded_tokens(samples) / tokens:>9.2f}{tokens / padded:>8.0f}"
                f"{tokens / packed:>8.0f}{padded / packed:>7.2f}{padded_cpu / packed_cpu:>13.2f}"
            )


if __name__ == "__main__":
    main()
