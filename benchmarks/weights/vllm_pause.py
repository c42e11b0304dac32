"""The same for a real vLLM: how long its requests wait for their next token when new weights come.

    HEADRACE_VLLM_PYTHON=/path/to/vllm/bin/python python -m benchmarks.weights.vllm_pause [--size 0.6b] [--requests 64]

vLLM runs behind our own contract (`inference/vllm/`), as in a run, and another process publishes random weights of the
same model. A request's gap is the longest between two of its tokens while the weights are changed: vLLM does not tell
when its workers have them. With keys and values kept it goes on where it was; otherwise all of them are computed again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from benchmarks.models import write_qwen3
from benchmarks.weights.pause import AFTER, BEFORE, MOST, PROMPT
from benchmarks.weights.publish import DEVICE, TrainerProcess

from headrace.config.inference import InferenceConfig
from headrace.inference.schema import SamplingParams
from headrace.inference.vllm.backend import VllmBackend
from headrace.inference.vllm.start import start_vllm
from headrace.rollout.version import Version
from headrace.text.tokenizer import Tokenizer
from headrace.transport.weights import WeightStore

TRAINER = "benchmarks.weights.pause"
ON_HOPPER = ["--attention-config", json.dumps({"backend": "FLASH_ATTN", "flash_attn_version": 3})]
VOCABULARY = 4000
"""Prompts are of tokens that every model has."""


class Measured(NamedTuple):
    """Milliseconds of one update."""

    publish: float
    update: float
    """From asking the engine to its answer."""
    step: float
    """Between two tokens, without an update."""
    first: float
    """The gap of the request with the shortest."""
    last: float


class Load:
    """Requests that go on sampling, and when each of their tokens came."""

    def __init__(self, backend: VllmBackend, count: int, seed: int) -> None:
        rng = random.Random(seed)
        params = SamplingParams(max_tokens=MOST, ignore_eos=True, logprobs=0)
        self.times: list[list[float]] = [[] for _ in range(count)]
        self._generations = [
            backend.submit([rng.randrange(10, VOCABULARY) for _ in range(PROMPT)], params) for _ in self.times
        ]
        self._following = [asyncio.create_task(self._follow(number)) for number in range(count)]

    async def _follow(self, number: int) -> None:
        async for piece in self._generations[number].chunks():
            self.times[number] += [time.perf_counter()] * len(piece.token_ids)

    async def wait(self, count: int) -> None:
        """Until each has that many tokens more."""
        goals = [len(times) + count for times in self.times]
        while any(len(times) < goal for times, goal in zip(self.times, goals, strict=True)):
            if ended := [task for task in self._following if task.done()]:
                raise RuntimeError(f"a request ended before its time: {ended[0].exception()}")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        for generation in self._generations:
            generation.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)


async def update(backend: VllmBackend, load: Load, publish: float, store: WeightStore, version: Version) -> Measured:
    begun = time.perf_counter()
    await backend.update_weights(store.path(version), version)
    answered = time.perf_counter()
    await load.wait(AFTER)
    gaps = [max(1e3 * (b - a) for a, b in pairwise(times) if b > begun) for times in load.times]
    before = [moment for moment in load.times[0] if moment < begun]  # several may come at once
    step = 1e3 * (before[-1] - before[0]) / (len(before) - 1)
    return Measured(publish, 1e3 * (answered - begun), step, min(gaps), max(gaps))


async def measure(
    kept: Literal["keep", "recompute"], model: Path, weights: Path, given: argparse.Namespace
) -> list[tuple[str, str, list[Measured]]]:
    """Each carrier on one vLLM, which keeps its keys and values or forgets them."""
    tokenizer, store = Tokenizer(model), WeightStore(weights)
    settings = {"python": os.environ["HEADRACE_VLLM_PYTHON"], "args": ON_HOPPER if DEVICE == "cuda" else []}
    config = InferenceConfig.model_validate(
        {"engine": "vllm", "max_running": given.requests, "max_model_len": 2048, "kv_on_update": kept, "vllm": settings}
    )
    trainer = TrainerProcess(TRAINER, str(weights), str(model))
    trainer.wait_until_ready()
    begun = time.perf_counter()
    backend = await start_vllm(config, model, eos_token_id=tokenizer.eos_token_id, decode=tokenizer.decode)
    print(f"vLLM is up after {time.perf_counter() - begun:.0f} s", flush=True)
    table, step = [], 0
    for carrier in given.carriers:
        measured = []
        for _ in range(1 + given.rounds if carrier != "files" else 1):  # the first one sets things up
            step += 1
            load = Load(backend, given.requests, step)
            await load.wait(BEFORE)
            publishing = await asyncio.to_thread(trainer.publish, carrier, Version(0, step))
            measured.append(await update(backend, load, publishing, store, Version(0, step)))
            await load.stop()
            numbers = ", ".join(f"{name} {value:.1f}" for name, value in measured[-1]._asdict().items())
            print(f"{carrier:>7}, {kept}: {numbers} ms", flush=True)
        table.append((carrier, kept, measured[1:] or measured))
    await backend.close()
    trainer.kill()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.6b")
    parser.add_argument("--model", type=Path, help="a directory with one model.safetensors, instead of random weights")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    carriers = [*(["ipc"] if DEVICE == "cuda" else []), "stream", "files"]
    parser.add_argument("--carriers", nargs="+", choices=carriers, default=carriers)
    parser.add_argument("--kv-cache", nargs="+", choices=["recompute", "keep"], default=["recompute", "keep"])
    given = parser.parse_args()
    table: list[tuple[str, str, list[Measured]]] = []
    with tempfile.TemporaryDirectory() as directory:
        model = given.model or Path(directory) / "model"
        if given.model is None:
            write_qwen3(model, given.size)
        for kept in given.kv_cache:
            table += asyncio.run(measure(kept, model, Path(directory) / f"weights-{kept}", given))
    print(f"\nvLLM, {given.model or given.size}, {given.requests} requests, medians, ms")
    print("| | KV cache | publish | update | a step | gap, first request | gap, last |\n|" + "---|" * 7)
    for carrier, kept, measured in table:
        columns = (f"{median(column):.1f}" for column in zip(*measured, strict=True))
        print(f"| {carrier} | {kept} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
