"""Milliseconds from a trainer's tensors to an engine's, by file and over the link, side by side.

    python -m benchmarks.weights.publish [--gigabytes 1.2] [--rounds 5] [--nccl]

Publishing is what training waits for; fetching is what happens while the engine samples; installing is what it stops
for. The trainer is a process of its own. On a machine with one GPU they share memory (`ipc`), and NCCL (`--nccl`) is
made to believe in two hosts and goes through sockets: that shows that it works, not how fast it is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from headrace.inference.cuda_driver import OpenedMemory
from headrace.inference.weights import link
from headrace.inference.weights.link import WeightsReceiver
from headrace.inference.weights.published import read_published
from headrace.rollout.version import Version
from headrace.trainer.snapshot import size_of, take_snapshot
from headrace.trainer.weights_link import WeightsSender
from headrace.transport.weights import WeightStore

ROW = 1024
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Tensors = dict[str, torch.Tensor]


class Times(NamedTuple):
    """Milliseconds of one version."""

    publish: float
    fetch: float
    install: float


def tensors(gigabytes: float) -> Tensors:
    """As many matrices as a small language model has."""
    count = 300
    rows = int(gigabytes * 1e9 / 2 / ROW / count)
    return {f"layer.{n}": torch.randn(rows, ROW, device=DEVICE).bfloat16() for n in range(count)}


class Trainer:
    """What publishes: files, or a sender for each carrier."""

    def __init__(self, weights: Path, content: Tensors) -> None:
        self._store = WeightStore(weights)
        self._content = content
        self._senders: dict[str, WeightsSender] = {}

    def publish(self, carrier: Any, version: Version) -> None:
        if carrier == "files":
            self._store.publish(version, lambda draft: save_file(self._content, draft / "model.safetensors"))
            return
        if carrier not in self._senders:
            self._senders[carrier] = WeightsSender(carrier=carrier, device=torch.device(DEVICE))
        sender = self._senders[carrier]
        sender.keep([Version(version.incarnation, version.step - 1)])
        row = sender.writable_buffer(lambda: size_of(self._content.values()))
        snapshot = take_snapshot(self._content.items(), buffer=row)
        self._store.publish(version, lambda draft: sender.offer(version, snapshot, draft))

    def follow_orders(self, change: Callable[[Tensors], None] = lambda content: None) -> None:
        """For each line `CARRIER VERSION` of input, publish and say how many milliseconds that took."""
        print("ready", flush=True)
        for line in sys.stdin:
            carrier, version = line.split()
            change(self._content)
            synchronize()
            begun = time.perf_counter()
            self.publish(carrier, Version.parse(version))
            print(1e3 * (time.perf_counter() - begun), flush=True)


class TrainerProcess:
    """The other end of the pipe: a module that follows orders."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--trainer", *arguments],
            env={**os.environ, "NCCL_HOSTID": "trainer"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        self._say(None)

    def publish(self, carrier: str, version: Version) -> float:
        return float(self._say(f"{carrier} {version}\n"))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _say(self, words: str | None) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        if words is not None:
            self._process.stdin.write(words)
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the trainer is gone")
        return answer


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@contextmanager
def timed(record: dict[str, list[float]]) -> Iterator[None]:
    """What of fetching takes how long where memory is shared."""
    open_memory, close_memory, compare = OpenedMemory.__init__, OpenedMemory.close, link.digests

    def timing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                record.setdefault(name, []).append(1e3 * (time.perf_counter() - begun))

        return call

    replaced: Any = OpenedMemory
    replaced.__init__, replaced.close = timing("open", open_memory), timing("close", close_memory)
    link.digests = timing("compare digests", compare)
    try:
        yield
    finally:
        replaced.__init__, replaced.close, link.digests = open_memory, close_memory, compare


def measure(trainer: TrainerProcess, store: WeightStore, carrier: str, model: Tensors, steps: range) -> list[Times]:
    receiver = WeightsReceiver(torch.device(DEVICE))
    found, parts = [], dict[str, list[float]]()
    with timed(parts):
        for step in steps:
            version = Version(0, step)
            publishing = trainer.publish(carrier, version)
            synchronize()
            begun = time.perf_counter()
            published = read_published(store.path(version), version, parameters=model, receive=receiver.receive)
            fetched = time.perf_counter()
            published.install(model)
            synchronize()
            installed = time.perf_counter()
            published.release()
            found.append(Times(publishing, 1e3 * (fetched - begun), 1e3 * (installed - fetched)))
            print(f"{carrier:>7}: publish {found[-1].publish:.1f} ms, ", end="")
            print(f"fetch {found[-1].fetch:.1f} ms, install {found[-1].install:.2f} ms", flush=True)
    print("   of it", {name: f"{median(times):.2f} ms" for name, times in parts.items()}, flush=True)
    receiver.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--trainer", metavar="WEIGHTS", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trainer is not None:
        Trainer(arguments.trainer, tensors(arguments.gigabytes)).follow_orders()
        return
    os.environ["NCCL_HOSTID"] = "engine"
    carriers = ["files", "stream", *(["ipc"] if DEVICE == "cuda" else []), *(["nccl"] if arguments.nccl else [])]
    table = []
    with tempfile.TemporaryDirectory() as directory:
        trainer = TrainerProcess(__spec__.name, directory, "--gigabytes", str(arguments.gigabytes))
        model = tensors(arguments.gigabytes)
        trainer.wait_until_ready()
        for number, carrier in enumerate(carriers):
            rounds = min(2, arguments.rounds) if carrier == "files" else arguments.rounds
            try:
                first = 1 + 100 * number
                times = measure(trainer, WeightStore(Path(directory)), carrier, model, range(first, first + rounds))
            except Exception as error:  # the others are still worth knowing
                print(f"{carrier}: {type(error).__name__}: {error}", flush=True)
                continue
            table.append((carrier, times))
        trainer.kill()
    print(f"\n{arguments.gigabytes:g} GB on {DEVICE}, medians (lowest to highest), ms")
    print("| | publish | fetch and verify | install |\n|---|---|---|---|")
    for carrier, times in table:
        columns = (f"{median(c):.1f} ({min(c):.1f} to {max(c):.1f})" for c in zip(*times, strict=True))
        print(f"| {carrier} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
