"""Speculative decoding in the tail of a batch: a trained model, real prompts, groups of eight, with and without drafts.

    python -m benchmarks.inference.speculation --model DIR [--prompts gsm8k] [--temperatures 1 0.7] [--batches 3]

A batch is 32 groups of eight requests, submitted at once, with a seed each, so that the same tokens are sampled with
and without drafts, up to rounding. Its tail begins when no more than 32 requests run. `per stream` is the tokens per
second of one request in the tail: all tokens, divided by the sum of the seconds of the requests that ran. `tokens/step`
is per request; `accepted` is the share of drafted tokens that were sampled; `GPU` is its time for a step. `entropy` is
minus the mean logprob of the sampled tokens. `again` are batches with the prompts and seeds of the batch before: every
sequence has been sampled before.

The prompts are GSM8K's questions, and the requests of the example that calls tools. `python -m benchmarks.models DIR`
makes a model. It needs a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.end_to_end.settings import Settings, drawn_prompts
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from headrace.config.inference import InferenceConfig
from headrace.config.model import ModelConfig
from headrace.inference.embedded.drafts import MAX_REQUESTS
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import load_engine
from headrace.inference.schema import SamplingParams
from headrace.text.tokenizer import Tokenizer

GROUPS, GROUP_SIZE = 32, 8
MAX_TOKENS = {"gsm8k": 512, "tool-calls": 64}


class Tail(NamedTuple):
    """Sums over the tails of some batches."""

    tokens: int = 0
    seconds: float = 0.0
    stream_seconds: float = 0.0
    """Seconds of each request that ran."""
    steps: int = 0
    steps_of_requests: int = 0
    device_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    logprob: float = 0.0
    """Mean of all sampled tokens, of the tail or not."""


def prompts(name: str, model: Path, count: int) -> list[list[int]]:
    """Return the first prompts of a workload, as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = Settings(name, str(model), 0, 1, count, GROUP_SIZE, MAX_TOKENS[name], 1.0, 0.0)
    chats = [messages for messages, _ in asyncio.run(drawn_prompts(settings))]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer(text)["input_ids"] for text in texts]


def run_batch(engine: Engine, batch: Sequence[list[int]], name: str, temperature: float, seed: int) -> Tail:
    """Run a batch, and measure its tail."""
    settings: dict[str, Any] = {"max_tokens": MAX_TOKENS[name], "temperature": temperature}
    requests = [
        engine.submit(prompt, SamplingParams(**settings, seed=seed + GROUP_SIZE * number + member))
        for number, prompt in enumerate(batch)
        for member in range(GROUP_SIZE)
    ]
    scheduler = engine.scheduler
    while len(scheduler.running) > MAX_REQUESTS or scheduler.num_waiting:
        engine.step()
    engine.finish_step()
    engine.reset_counters()
    begun = last = time.perf_counter()
    stream_seconds, steps_of_requests = 0.0, 0
    while engine.has_work:
        running = len(scheduler.running)
        engine.step()
        now = time.perf_counter()
        stream_seconds += running * (now - last)
        steps_of_requests += running
        last = now
    logprobs = [logprob for request in requests for logprob in request.future.result().logprobs]
    times = last - begun, stream_seconds
    steps = engine.steps, steps_of_requests, engine.device_busy_s
    drafts = engine.tokens_drafted, engine.tokens_accepted
    return Tail(engine.tokens_sampled, *times, *steps, *drafts, sum(logprobs) / len(logprobs))


def measure(
    model: Path, names: Sequence[str], drafts: int, temperatures: Sequence[float], batches: int
) -> Iterator[tuple[Any, ...]]:
    """Yield a row of the table for each workload and temperature."""
    config = InferenceConfig(
        model=ModelConfig(name=str(model), dtype="bfloat16"), max_model_len=1024, speculative_tokens=drafts
    )
    engine = load_engine(config, model, Tokenizer(model))
    for name in names:
        chosen = prompts(name, model, (batches + 1) * GROUPS)
        for temperature in temperatures:
            for label, first in ((name, GROUPS), (f"{name}, again", 0)):
                starts = [first + GROUPS * number for number in range(batches)] if first else [0] * (batches + 1)
                tails = [run_batch(engine, chosen[s : s + GROUPS], name, temperature, s * GROUP_SIZE) for s in starts]
                tails = tails if first else tails[1:]
                total = Tail(*(sum(column) for column in zip(*tails, strict=True)))
                yield label, temperature, drafts, total, total.logprob / len(tails)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", nargs="+", default=list(MAX_TOKENS), choices=list(MAX_TOKENS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.7])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--batches", type=int, default=3)
    args = parser.parse_args()
    rows = []
    for drafts in args.drafts:
        for row in measure(args.model, args.prompts, drafts, args.temperatures, args.batches):
            rows.append(row)
            print(*row, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    table = Table(title=f"Tails of {args.batches} batches of {GROUPS} groups of {GROUP_SIZE}")
    columns = ("temperature", "entropy", "draft", "tokens", "s", "ms/step", "GPU", "per stream", "times", "tokens/step")
    for column in ("prompts", *columns, "accepted"):
        table.add_column(column, justify="left" if column == "prompts" else "right")
    rows = [row for row in rows if row[3].tokens]  # there is no tail if all requests are cut
    base = {row[:2]: row[3].tokens / row[3].stream_seconds for row in rows if row[2] == args.drafts[0]}
    for label, temperature, drafts, tail, logprob in sorted(rows, key=lambda row: row[:3]):
        rate = tail.tokens / tail.stream_seconds
        table.add_row(
            label,
            f"{temperature}",
            f"{-logprob:.2f}",
            f"{drafts}",
            f"{tail.tokens:,}",
            f"{tail.seconds:.2f}",
            f"{1000 * tail.seconds / tail.steps:.2f}",
            f"{1000 * tail.device_seconds / tail.steps:.2f}",
            f"{rate:,.0f}",
            f"{rate / base[label, temperature]:.2f}",
            f"{tail.tokens / tail.steps_of_requests:.2f}",
            f"{tail.accepted / tail.drafted:.2f}" if tail.drafted else "",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
