"""Tokens per second of the packed training step beside a plain padded Hugging Face loop, on the same data.

    python benchmarks/trainer/cpu.py [--threads 1] [--steps 5]

Both train the tiny model by cross-entropy on the same tokens with the same optimizer. The plain loop pads batches of 32
sequences, as they come, and accumulates gradients over them. Tokens are those of the data: neither padding nor sharing
changes the count. CPU time is shown too, since it holds still on a busy machine.
"""

from __future__ import annotations

import argparse
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

    groups = [(text(15, 21), [text(5, 9) for _ in range(8)]) for _ in range(32)]
    return {
        "32 prompts x 8 short answers": [sample_of(prompt, answer) for prompt, answers in groups for answer in answers],
        "64 short chats": [sample_of(text(15, 21), text(5, 9)) for _ in range(64)],
        "64 mixed lengths, 16 to 256": [sample_of(text(8, 64), text(8, 192)) for _ in range(64)],
    }


def packed_step(directory: Path, samples: list[Sample]) -> Callable[[], object]:
    model = PackedModel(directory, torch.device("cpu"))
    step = TrainStep(model, Optimizer(model.named_parameters()), {"ce": ce_loss}, lm_head_chunk=4096)
    return lambda: step.run(pack(samples, 512), lr=1e-4)


def padded_loop(directory: Path, samples: list[Sample]) -> Callable[[], object]:
    model = AutoModelForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    learned = sum(int(sample.mask.sum()) for sample in samples)

    def step() -> None:
        for start in range(0, len(samples), PADDED_BATCH):
            batch = samples[start : start + PADDED_BATCH]
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


def measure(step: Callable[[], object], steps: int) -> tuple[float, float]:
    """Seconds by the clock and of the CPU, for one step."""
    step()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        write_tiny_model(directory)
        title = f"one step on {arguments.threads} thread(s)"
        print(f"{title:<30}{'tokens':>8}{'':>9}{'tokens/s':>10}{'ms':>8}{'CPU ms':>9}")
        for name, samples in workloads().items():
            tokens = sum(len(sample) for sample in samples)
            for kind, make in (("padded", padded_loop), ("packed", packed_step)):
                wall, cpu = measure(make(directory, samples), arguments.steps)
                print(f"{name:<30}{tokens:>8}{kind:>9}{tokens / wall:>10.0f}{wall * 1e3:>8.0f}{cpu * 1e3:>9.0f}")


if __name__ == "__main__":
    main()
