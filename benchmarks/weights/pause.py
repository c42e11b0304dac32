"""How long a live engine's requests wait for their next token when new weights come, whichever way they come.

    python -m benchmarks.weights.pause [--size 0.6b] [--requests 64] [--rounds 3] [--compile]

The embedded engine samples in this process, and another one publishes random weights of the same model. A request's
gap is from its last token before the weights were changed to its first one after; beside it is the gap between any two
tokens. With the keys and values kept that is a copy and a step; otherwise everything is computed again first. An
`adapter` is one of rank 16 for all linear layers, which the engine merges with its base.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from benchmarks.models import write_qwen3
from benchmarks.weights.publish import DEVICE, Trainer, TrainerProcess
from safetensors.torch import load_file

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import load_model
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version
from headrace.transport.adapter import Adapter, AdapterConfig, Matrices, write_adapter
from headrace.transport.weights import WeightStore

RANK = 16
PROMPT, MOST = 256, 1700
BEFORE, AFTER = 60, 20
"""Tokens that each request samples before an update is begun, and after it."""


class Measured(NamedTuple):
    """Milliseconds of one update."""

    publish: float
    update: float
    """From asking the engine to its answer."""
    install: float
    """On the engine's thread, with the wait for the step in flight."""
    step: float
    """Between two tokens, without an update."""
    first: float
    """The gap of the request that has its next token first."""
    last: float


class Load:
    """Requests that go on sampling, and when each of their tokens came."""

    def __init__(self, thread: EngineThread, count: int, seed: int) -> None:
        rng = random.Random(seed)
        self._thread = thread
        self.times: list[list[float]] = [[] for _ in range(count)]
        params = SamplingParams(max_tokens=MOST, ignore_eos=True, seed=None)
        self.requests = []
        for times in self.times:
            prompt = [rng.randrange(1000, 100_000) for _ in range(PROMPT)]
            request = thread.submit(prompt, params)
            request.on_tokens = lambda times=times: times.append(time.perf_counter())
            self.requests.append(request)

    def wait(self, count: int) -> None:
        """Until each has that many tokens more."""
        goals = [len(times) + count for times in self.times]
        while any(len(times) < goal for times, goal in zip(self.times, goals, strict=True)):
            ended = [request.future for request in self.requests if request.future.done()]
            if ended:
                raise RuntimeError(f"a request ended before its time: {ended[0].exception()}")
            time.sleep(0.002)

    def stop(self) -> None:
        for request in self.requests:
            self._thread.cancel(request)
        for request in self.requests:
            request.future.exception()


def update(
    thread: EngineThread, load: Load, publish: Callable[[Version], float], store: WeightStore, version: Version
) -> Measured:
    installs: list[tuple[float, float]] = []
    engine: Any = thread.engine
    install = engine.install

    def timing(published: Any) -> None:
        begun = time.perf_counter()
        install(published)
        installs.append((begun, time.perf_counter()))

    load.wait(BEFORE)
    publishing = publish(version)
    engine.install = timing
    begun = time.perf_counter()
    thread.update_weights(store.path(version), version)
    answered = time.perf_counter()
    engine.install = install
    load.wait(AFTER)
    [(changed, done)] = installs  # tokens of the step in flight come before `done`
    gaps = []
    for times in load.times:
        after = next(n for n, moment in enumerate(times) if moment > done)
        gaps.append(1e3 * (times[after] - times[after - 1]))
    usual = [1e3 * (b - a) for a, b in pairwise(load.times[0]) if b < begun]
    return Measured(publishing, 1e3 * (answered - begun), 1e3 * (done - changed), median(usual), min(gaps), max(gaps))


def publish_adapter(engine: Engine, store: WeightStore, version: Version) -> float:
    linear = {name: part.weight.shape for name, part in engine.model.named_modules() if name.endswith("_proj")}
    layers = {
        name: Matrices(torch.randn(RANK, inputs) / 100, torch.randn(outputs, RANK) / 100)
        for name, (outputs, inputs) in linear.items()
    }
    adapter = Adapter(AdapterConfig(RANK, 32.0, "all-linear"), layers)
    begun = time.perf_counter()
    store.publish(version, lambda draft: write_adapter(draft, adapter))
    return 1e3 * (time.perf_counter() - begun)


def signs(engine: Engine) -> torch.Tensor:
    """Of some weights: the trainer's change theirs with every version."""
    return engine.model.get_input_embeddings().weight[5, :64].float().sign()  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.6b")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="compile the engine's layers, which takes longer first")
    parser.add_argument("--trainer", nargs=2, type=Path, metavar="PATH", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer is not None:
        weights, model = arguments.trainer
        content = load_file(model / "model.safetensors", DEVICE)
        Trainer(weights, content).follow_orders(lambda tensors: [tensor.neg_() for tensor in tensors.values()])
        return
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        begun = time.perf_counter()
        write_qwen3(model, arguments.size)
        trainer = TrainerProcess(__spec__.name, f"{directory}/weights", str(model))
        loaded = load_model(model)
        engine = Engine(
            loaded, max_model_len=2048, max_running=arguments.requests, compile=arguments.compile, base=model
        )
        thread = EngineThread(engine)
        trainer.wait_until_ready()
        print(f"Qwen3-{arguments.size} is up after {time.perf_counter() - begun:.0f} s", flush=True)
        table = compare(thread, trainer, WeightStore(Path(directory) / "weights"), arguments)
        thread.stop()
        trainer.kill()
    print(f"\nQwen3-{arguments.size}, {arguments.requests} requests, medians, ms")
    print("| | KV cache | publish | update | install | a step | gap, first request | gap, last |\n|" + "---|" * 8)
    for carrier, kept, measured in table:
        columns = (f"{median(column):.1f}" for column in zip(*measured, strict=True))
        print(f"| {carrier} | {kept} | {' | '.join(columns)} |")


def compare(
    thread: EngineThread, trainer: TrainerProcess, store: WeightStore, arguments: argparse.Namespace
) -> list[tuple[str, str, list[Measured]]]:
    engine = thread.engine
    table, step, negated, original = [], 0, 0, signs(engine)
    for kept in ("keep", "recompute"):
        engine.kv_on_update = kept
        for carrier in (*(["ipc"] if DEVICE == "cuda" else []), "stream", "files", "adapter"):
            publish = partial(trainer.publish, carrier)
            if carrier == "adapter":
                publish = partial(publish_adapter, engine, store)
            measured = []
            for _ in range(1 if carrier == "files" else 1 + arguments.rounds):  # the first one sets things up
                if thread.failure.done():
                    return table
                step, negated = step + 1, negated + (carrier != "adapter")
                load = Load(thread, arguments.requests, step)
                try:
                    measured.append(update(thread, load, publish, store, Version(0, step)))
                    if carrier != "adapter":
                        assert torch.equal(signs(engine), original * (-1) ** negated), "these are not the trainer's"
                except Exception as error:  # the others are still worth knowing
                    print(f"{carrier}, {kept}: {type(error).__name__}: {error}", flush=True)
                    break
                finally:
                    load.stop()
                numbers = ", ".join(f"{name} {value:.1f}" for name, value in measured[-1]._asdict().items())
                print(f"{carrier:>7}, {kept}: {numbers} ms", flush=True)
            if measured:
                table.append((carrier, kept, measured[1:] or measured))
    return table


if __name__ == "__main__":
    main()
