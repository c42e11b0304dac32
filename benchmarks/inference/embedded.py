"""Tokens per CPU-second of the embedded engine beside `model.generate` in lock-step, on one tiny model.

    OMP_NUM_THREADS=1 python benchmarks/inference/embedded.py

Lock-step means batches of the given size, left-padded, each running until its longest completion is done. `group`
is the number of requests that share a prompt, as the members of a group do in training. CPU time, not the clock's: on
one thread they are the same, and a busy machine changes only the latter.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import lay_out_for_small_batches
from headrace.inference.schema import SamplingParams

PROMPT_LENGTHS = (12, 28)
COMPLETION_LENGTHS = (4, 16)
MAX_MODEL_LEN = 128
VOCAB = 300

Job = tuple[list[int], int]


def make_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    lay_out_for_small_batches(model)
    return model


def make_jobs(count: int, group: int) -> list[Job]:
    """Prompts and completion lengths."""
    rng = random.Random(0)
    jobs: list[Job] = []
    for _ in range(count // group):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(*PROMPT_LENGTHS))]
        jobs += [(prompt, rng.randint(*COMPLETION_LENGTHS)) for _ in range(group)]
    return jobs


def run_engine(model: Any, jobs: list[Job], concurrent: int) -> float:
    """CPU-seconds for all jobs, `concurrent` of them in flight at any time."""
    engine = Engine(model, max_model_len=MAX_MODEL_LEN, max_running=concurrent)
    line = list(reversed(jobs))
    start = time.process_time()
    while line or engine.has_work:
        while line and len(engine.running) + len(engine.waiting) < concurrent:
            prompt, length = line.pop()
            engine.submit(prompt, SamplingParams(max_tokens=length, ignore_eos=True))
        engine.step()
    return time.process_time() - start


@torch.inference_mode()
def run_lock_step(model: Any, jobs: list[Job], concurrent: int) -> float:
    """CPU-seconds for all jobs through `model.generate`, a batch at a time."""
    model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = None
    start = time.process_time()
    for first in range(0, len(jobs), concurrent):
        batch = jobs[first : first + concurrent]
        width = max(len(prompt) for prompt, _ in batch)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        longest = max(length for _, length in batch)
        model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=True, pad_token_id=0)
    return time.process_time() - start


def main() -> None:
    model = make_model()
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    table = Table(title=f"{size:.1f}M parameters, {torch.get_num_threads()} thread(s); sampled tokens per CPU-second")
    for column in ("concurrent", "group", "engine", "requests/s", "model.generate", "ratio"):
        table.add_column(column, justify="right")
    run_engine(model, make_jobs(32, 1), 32)
    run_lock_step(model, make_jobs(32, 1), 32)
    for concurrent, group in ((1, 1), (32, 1), (32, 8), (128, 1), (128, 8), (256, 8)):
        jobs = make_jobs(max(16, 6 * concurrent), group)
        tokens = sum(length for _, length in jobs)
        ours, theirs = run_engine(model, jobs, concurrent), run_lock_step(model, jobs, concurrent)
        table.add_row(
            str(concurrent),
            str(group),
            f"{tokens / ours:,.0f}",
            f"{len(jobs) / ours:,.0f}",
            f"{tokens / theirs:,.0f}",
            f"{theirs / ours:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
