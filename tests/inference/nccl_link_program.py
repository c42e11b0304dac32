"""The weights link by NCCL, between two processes that share one GPU: `nccl_link_program.py DIRECTORY`.

NCCL refuses that unless the two say that they are on different hosts; then it goes through sockets, at their speed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from headrace.inference.weights.link import WeightsReceiver
from headrace.inference.weights.reading import WeightsUnreachable
from headrace.rollout.version import Version
from headrace.transport.weights import WeightStore
from tests.inference.weights_sender import SenderProcess

GPU = torch.device("cuda", 0)
DYING = """
import sys, torch
from pathlib import Path
from headrace.inference.weights.link import WeightsReceiver
from headrace.rollout.version import Version
print("receiving", flush=True)
WeightsReceiver(torch.device("cuda", 0)).receive(Path(sys.argv[1]), Version.parse(sys.argv[2]))
"""


def write(path: Path, seed: int, megabytes: int) -> Path:
    generator = torch.Generator(GPU).manual_seed(seed)
    sizes = [100, 4, megabytes << 18, 3 << 18]
    tensors = {
        f"tensor {n}": torch.randn(size, generator=generator, device=GPU).bfloat16() for n, size in enumerate(sizes)
    }
    save_file(tensors, path)
    return path


def assert_same(received: dict[str, torch.Tensor], path: Path) -> None:
    expected = load_file(path)
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name].cpu(), expected[name]) for name in expected)


def assert_given_up(receiver: WeightsReceiver, path: Path, version: Version, disturb: int, pid: int) -> None:
    """Disturb the trainer in the middle of a transfer; the engine's GPU must go on."""
    timer = threading.Timer(0.3, os.kill, (pid, disturb))
    timer.start()
    begun = time.monotonic()
    try:
        receiver.receive(path, version)
    except WeightsUnreachable as error:
        print(f"signal {disturb}: given up after {time.monotonic() - begun:.1f} s: {error}", flush=True)
    else:
        raise AssertionError("it came through")
    assert torch.ones(3, device=GPU).sum().item() == 3
    torch.cuda.synchronize()


def main(directory: Path) -> None:
    os.environ["NCCL_HOSTID"] = "engine"
    os.environ["NCCL_MAX_NCHANNELS"] = "1"  # slow enough to be disturbed
    store = WeightStore(directory / "weights")
    trainer, mortal = (SenderProcess(store.directory, "nccl", "cuda:0") for _ in range(2))
    small = [write(directory / f"{seed}.safetensors", seed, 200) for seed in range(3)]
    large = write(directory / "large.safetensors", 9, 4000)
    receiver = WeightsReceiver(GPU, timeout_s=30.0)
    for step, path in enumerate(small, 1):
        version = Version(0, step)
        trainer.publish(version, path)
        begun = time.monotonic()
        plenty = torch.cuda.mem_get_info(GPU)
        with patch("torch.cuda.mem_get_info", return_value=(0, 0) if step == 3 else plenty):
            received = receiver.receive(store.path(version), version).tensors
        seconds = time.monotonic() - begun
        where = received["tensor 2"].device
        print(f"version {version} by {type(receiver._pair).__name__} to {where}: {seconds:.2f} s", flush=True)
        assert receiver._pair is not None and where.type == ("cpu" if step == 3 else "cuda")
        assert_same(received, path)

    trainer.publish(Version(0, 4), large)
    command = [sys.executable, "-c", DYING, str(store.path(Version(0, 4))), "0-4"]
    dying = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert dying.stdout is not None
    dying.stdout.readline()
    time.sleep(1.0)
    assert dying.poll() is None, "it was through before it could be killed"
    dying.kill()
    dying.communicate()
    version = Version(0, 5)
    trainer.publish(version, small[0])
    assert_same(WeightsReceiver(GPU).receive(store.path(version), version).tensors, small[0])
    print("the trainer serves on after an engine was killed", flush=True)

    mortal.publish(Version(1, 1), small[1])
    mortal.publish(Version(1, 2), large)
    hasty = WeightsReceiver(GPU, timeout_s=5.0)  # which making a group takes a part of
    assert_same(hasty.receive(store.path(Version(1, 1)), Version(1, 1)).tensors, small[1])
    assert_given_up(hasty, store.path(Version(1, 2)), Version(1, 2), signal.SIGSTOP, mortal.pid)
    os.kill(mortal.pid, signal.SIGCONT)
    assert_same(hasty.receive(store.path(Version(1, 1)), Version(1, 1)).tensors, small[1])
    print("the trainer serves on after it had been stopped", flush=True)
    assert_given_up(hasty, store.path(Version(1, 2)), Version(1, 2), signal.SIGKILL, mortal.pid)
    version = Version(0, 6)
    trainer.publish(version, small[2])
    assert_same(hasty.receive(store.path(version), version).tensors, small[2])
    print("the engine follows another trainer", flush=True)
    for each in (receiver, hasty):
        each.close()  # while their partner lives
    trainer.kill()
    mortal.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
