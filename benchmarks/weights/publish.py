"""Seconds from a trainer's tensors to an engine's, by file and over the link, side by side.

    python benchmarks/weights/publish.py [--gigabytes 1.2] [--rounds 3] [--nccl]

Publishing is what training waits for; fetching is what happens while the engine samples; installing is what it stops
for. The sender is a process of its own. On a machine with one GPU, NCCL (`--nccl`) is made to believe in two hosts and
goes through sockets: that shows that it works, not how fast it is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.inference.weights.link import WeightsReceiver
from headrace.inference.weights.published import PublishedWeights, read_published
from headrace.rollout.version import Version
from headrace.trainer.weights_link import WeightsSender, take_snapshot
from headrace.transport.weights import WeightStore

ROW = 1024


def tensors(gigabytes: float, device: str) -> dict[str, torch.Tensor]:
    """As many matrices as a small language model has."""
    count = 300
    rows = int(gigabytes * 1e9 / 2 / ROW / count)
    return {f"layer.{n}": torch.randn(rows, ROW, device=device).bfloat16() for n in range(count)}


def trainer(directory: Path, gigabytes: float, carrier: Any, device: str) -> None:
    """For each line of input, publish another version and say how long that took."""
    store, sender = (
        WeightStore(directory),
        None if carrier == "files" else WeightsSender(carrier=carrier, device=torch.device(device)),
    )
    content = tensors(gigabytes, device)
    print("ready", flush=True)
    for step, _ in enumerate(sys.stdin, 1):
        version = Version(0, step)
        begun = time.monotonic()
        if sender is None:
            store.publish(version, lambda draft: save_file(content, draft / "model.safetensors"))
        else:
            sender.keep([Version(0, step - 1)])
            snapshot = take_snapshot(content.items())
            store.publish(version, lambda draft: sender.offer(version, snapshot, draft))  # noqa: B023
        print(time.monotonic() - begun, flush=True)


def measure(carrier: str, gigabytes: float, rounds: int, device: str) -> None:
    model = tensors(gigabytes, device)
    receiver = WeightsReceiver(torch.device(device))
    shape = f"{gigabytes:g} GB on {device}"
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--trainer", directory, carrier, "--gigabytes", str(gigabytes)]
        environment = {**os.environ, "NCCL_HOSTID": "trainer"}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        store = WeightStore(Path(directory))
        for step in range(1, rounds + 1):
            process.stdin.write("\n")
            process.stdin.flush()
            publishing = float(process.stdout.readline())
            version = Version(0, step)
            begun = time.monotonic()
            published = read_published(store.path(version), version, parameters=model, receive=receiver.receive)
            fetching = time.monotonic() - begun
            begun = time.monotonic()
            install(model, published)
            installing = time.monotonic() - begun
            times = f"publish {publishing:6.2f} s, fetch {fetching:6.2f} s, install {installing:6.3f} s"
            print(f"{carrier:>7}, {shape}: {times}", flush=True)
        process.kill()
        process.wait()


def install(model: dict[str, torch.Tensor], published: PublishedWeights) -> None:
    for name, tensor in published.tensors.items():
        model[name].copy_(tensor)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--trainer", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.trainer is not None:
        directory, carrier = arguments.trainer
        trainer(Path(directory), arguments.gigabytes, carrier, device)
        return
    os.environ["NCCL_HOSTID"] = "engine"
    for carrier in ("files", "stream", *(["nccl"] if arguments.nccl else [])):
        measure(carrier, arguments.gigabytes, arguments.rounds, device)


if __name__ == "__main__":
    main()
