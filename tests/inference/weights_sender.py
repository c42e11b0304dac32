"""A trainer as far as engines see it, in a process of its own: `weights_sender.py WEIGHTS CARRIER DEVICE [SHARED]`.

For each line `VERSION FILE` of its input it publishes the tensors of a safetensors file over the link, and answers with
the checksum of the published version. `SHARED` is where memory lies that stands in for a GPU's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from headrace.rollout.version import Version
from headrace.trainer.snapshot import size_of, take_snapshot
from headrace.trainer.weights_link import WeightsSender
from headrace.transport.weights import WeightStore
from tests.inference.host_driver import HostDriver, use


class SenderProcess:
    """The other end of the pipe."""

    def __init__(
        self,
        weights: Path,
        carrier: str = "auto",
        device: str = "cpu",
        shared: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        options = [str(weights), carrier, device, *([] if shared is None else [str(shared)])]
        self._process = subprocess.Popen(
            [python, "-m", "tests.inference.weights_sender", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NCCL_HOSTID": "trainer"},  # else NCCL refuses to have both ends on one GPU
        )
        self.pid = self._process.pid

    def publish(self, version: Version, tensors: Path) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{version} {tensors}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def main(weights: str, carrier: Any, device: str, shared: str | None = None) -> None:
    if shared is not None:
        use(HostDriver(Path(shared)))
    store, sender = WeightStore(Path(weights)), WeightsSender(carrier=carrier, device=torch.device(device))
    for line in sys.stdin:
        name, file = line.split()
        version = Version.parse(name)
        tensors = load_file(file, device)
        row = sender.writable_buffer(lambda: size_of(tensors.values()))  # noqa: B023
        snapshot = take_snapshot(tensors.items(), buffer=row)
        marker = store.publish(version, lambda draft: sender.offer(version, snapshot, draft))  # noqa: B023
        print(marker.checksum, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
