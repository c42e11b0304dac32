"""Host time of the engine's steps on a GPU, without one: everything but the forward, in whose place a rule samples.

    make .venv-triton/.installed
    .venv-triton/bin/python -m benchmarks.inference.host_time [--running 32 256] [--drafts 0 8] [--noise 0.15]

Without drafts a step is launched while the GPU computes the one before, so that the host bounds the rate only where
its `ms/step` exceed the GPU's. A step with drafts is launched after the output of the one before was read: for `gap`
the GPU is idle. It is divided into the time to read the output, to append its tokens to their requests, to plan the
step, to find drafts, and to stage the inputs. Drafts are used up to 32 running requests.

The rule: a token is followed by the next of 150, or with the probability `--noise` by any of them. Requests with equal
prompts have finished before. The second table is of the conversations with tools of `benchmarks.inference.traffic`:
short turns, each of which prefills, and growing prefixes. Launching a CUDA graph and waiting for a GPU, some .1 ms, are
not measured. Times are CPU time of the engine's thread, so that other programs disturb them little.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from benchmarks.inference.traffic_jobs import TRAFFIC, Conversation
from rich.console import Console
from rich.table import Table
from torch import Tensor

from headrace.inference.embedded.cuda.launched_step import CudaStep
from headrace.inference.embedded.cuda.rows import StepRows
from headrace.inference.embedded.cuda.runner import GRAPHED_PREFILL_TOKENS, CudaRunner
from headrace.inference.embedded.cuda.steps import StepShape
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.scheduler import Scheduler
from headrace.inference.schema import SamplingParams

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
FIRST, TOKENS = 5, 150
PROMPT, COMPLETION, SIBLINGS = 100, 400, 3
WARM_UP_STEPS, ROUNDS = 60, 3
TOOLS_WARM_UP_STEPS, TOOLS_STEPS = 300, 1000
IN_FLIGHT = 1.5
"""Conversations for each request that runs."""
STAGES = ("read", "append", "plan", "find drafts", "stage")


class RuleRunner(CudaRunner):
    """The runner for GPUs with a rule in the place of the model."""

    def __init__(self, *args: Any, noise: float, **options: Any) -> None:
        self._noise, self._rule_random = noise, np.random.default_rng(0)
        super().__init__(*args, **options, compile=False, graphs=False)

    def _warm_up(self) -> None:
        pass

    def _compute(self, shape: StepShape) -> Tensor:
        count = min(shape.tokens, self._rows.count)
        inputs = self._rows.inputs
        sources, sampled = inputs.sources[:count].numpy(), self._sampled.numpy()
        ids = np.where(sources >= 0, sampled[0][sources], inputs.ids[:count].numpy())
        is_random = self._rule_random.random(count) < self._noise
        following = np.where(is_random, self._rule_random.integers(0, TOKENS, count), (ids - FIRST + 1) % TOKENS)
        sampled[:, :count] = following + FIRST, np.full(count, -1.0)
        return torch.zeros(count, 1)


class Clock:
    """Times of events of a step, and from them the parts of the gap before each launch with drafts."""

    def __init__(self) -> None:
        self.parts: defaultdict[str, list[float]] = defaultdict(list)
        self._times: dict[str, float] = {}

    def mark(self, owner: type, method: str, *, before: str = "", after: str = "") -> None:
        """Record the time before or after each call of a method."""
        call = getattr(owner, method)

        def timed(*args: Any, **options: Any) -> Any:
            if before:
                self._times[before] = time.thread_time()
            result = call(*args, **options)
            if after:
                self._times[after] = time.thread_time()
            if before == "launched":
                self._end_gap()
            return result

        setattr(owner, method, timed)

    def _end_gap(self) -> None:
        times, self._times = self._times, {}
        if "found" not in times or "begun" not in times:
            return
        self.parts["gap"].append(times["launched"] - times["begun"])
        self.parts["read"].append(times["read"] - times["begun"])
        self.parts["append"].append(times["finished"] - times["read"])
        self.parts["plan"].append(times["planned"] - times["finished"])
        self.parts["find drafts"].append(times["found"] - times["planned"])
        self.parts["stage"].append(times["launched"] - times["found"])


def run(engine: Engine, clock: Clock, running: int) -> tuple[float, float]:
    """Return the seconds of a step, and the tokens per request and step, of requests that all run."""
    prompts = [[FIRST + (31 * n + 7 * k) % TOKENS for k in range(PROMPT)] for n in range(max(1, running // 8))]
    params = SamplingParams(max_tokens=COMPLETION, ignore_eos=True)
    for _ in range(SIBLINGS):
        for prompt in prompts:
            engine.submit(prompt, params)
    while engine.has_work:
        engine.step()
    times: list[float] = []
    sampled = steps = 0
    for _ in range(ROUNDS):
        for number in range(running):
            engine.submit(prompts[number % len(prompts)], params)
        for _ in range(WARM_UP_STEPS):
            engine.step()
        engine.reset_counters()
        clock.parts.clear()
        while len(engine.scheduler.running) == running:
            start = time.thread_time()
            engine.step()
            times.append(time.thread_time() - start)
        sampled, steps = sampled + engine.tokens_sampled, steps + engine.steps
        while engine.has_work:
            engine.step()
    return statistics.median(times), sampled / steps / running


def converse(engine: Engine, conversations: Iterator[Conversation]) -> Iterator[Request]:
    """Submit the turns of one conversation after the other; the next request is taken when the last one is done."""
    for turns in conversations:
        tokens: list[int] = []
        for turn in turns:
            request = engine.submit(tokens + turn.tokens, SamplingParams(max_tokens=turn.completion, ignore_eos=True))
            yield request
            tokens = request.tokens


def run_tools(engine: Engine, running: int) -> tuple[float, ...]:
    """Return, for the mean step of traffic with tools, its requests, prefilled and cached tokens, and seconds."""
    conversations = TRAFFIC["tools"].conversations(SIZES["vocab_size"])
    clients = [converse(engine, conversations) for _ in range(int(IN_FLIGHT * running))]
    current = [next(client) for client in clients]
    counts: list[int] = []
    seconds = 0.0
    for step in range(TOOLS_WARM_UP_STEPS + TOOLS_STEPS):
        if step == TOOLS_WARM_UP_STEPS:
            engine.reset_counters()
            seconds = 0.0
        start = time.thread_time()
        engine.step()
        seconds += time.thread_time() - start
        counts.append(len(engine.scheduler.running))
        for index, request in enumerate(current):
            if request.is_done:
                current[index] = next(clients[index])
    totals = engine.scheduler.tokens_computed, engine.scheduler.tokens_cached, seconds
    return statistics.mean(counts[TOOLS_WARM_UP_STEPS:]), *(total / TOOLS_STEPS for total in totals)


def make_engine(model: Any, running: int, drafts: int, noise: float) -> Engine:
    sizes = {"max_running": max(256, running), "max_model_len": SIZES["max_position_embeddings"]}
    engine = Engine(model, **sizes, max_step_tokens=GRAPHED_PREFILL_TOKENS, speculative_tokens=drafts)
    blocks = engine.scheduler.blocks.num_usable + 1
    engine.runner = RuleRunner(model, blocks, engine.adapters, **sizes, noise=noise)
    gc.collect()
    gc.freeze()
    return engine


def rows(args: argparse.Namespace, model: Any, clock: Clock) -> Iterator[tuple[str, ...]]:
    for running in args.running:
        for drafts in args.drafts:
            seconds, tokens = run(make_engine(model, running, drafts, args.noise), clock, running)
            parts = [clock.parts[name] for name in ("gap", *STAGES)]
            medians = [f"{1e3 * statistics.median(part):.3f}" if part else "" for part in parts]
            yield str(running), str(drafts), f"{tokens:.2f}", f"{1e3 * seconds:.3f}", *medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--noise", type=float, default=0.15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("headrace").setLevel(logging.ERROR)  # the engine is made with the runner for CPUs
    clock = Clock()
    clock.mark(CudaStep, "output", before="begun", after="read")
    clock.mark(Engine, "finish_step", after="finished")
    clock.mark(Scheduler, "schedule", after="planned")
    clock.mark(Engine, "_add_drafts", after="found")
    clock.mark(StepRows, "send", before="launched")
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES)).eval()
    table = Table(title="Host time of a step, ms")
    for column in ("running", "drafts", "tokens/step", "ms/step", "gap", *STAGES):
        table.add_column(column, justify="right")
    for row in rows(args, model, clock):
        table.add_row(*row)
    tools = Table("running", "prefilled tokens", "tokens of the prefix cache", "ms/step", title="A step of tools")
    for running in args.running:
        mean, prefilled, cached, seconds = run_tools(make_engine(model, running, 0, args.noise), running)
        tools.add_row(f"{mean:.0f}", f"{prefilled:.0f}", f"{cached:.0f}", f"{1e3 * seconds:.3f}")
    for each in (table, tools):
        Console(width=110).print(each)


if __name__ == "__main__":
    main()
