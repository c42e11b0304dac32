"""Saves a checkpoint from one copy, another one streamed, and loads it: `saving_process SIZE DIRECTORY`.

Prints the three peaks of memory above that of the tensors, in bytes. A process of its own: a peak is that of a whole
process.
"""

import sys
from pathlib import Path

import torch

from headrace.trainer import tensor_files
from headrace.trainer.checkpoint import Checkpoints, TrainState, load_tensors
from headrace.trainer.ranks import Ranks

TENSORS = 8
BUCKET_BYTES = 1 << 21
"""Smaller than in a run, so that a small checkpoint has many."""


def memory(name: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


class Peak:
    """The peak of memory from now on, above the current memory."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = memory("VmRSS:")

    def __str__(self) -> str:
        return str(memory("VmHWM:") - self._before)


def main(size: int, directory: Path) -> None:
    tensor_files.BUCKET_BYTES = BUCKET_BYTES
    rows = size // TENSORS // 4096
    tensors = {f"model.{number}": torch.full((rows, 1024), float(number)) for number in range(TENSORS)}
    checkpoints = Checkpoints(directory, Ranks(), keep_last=2)
    for step, copies in ((1, True), (2, False)):
        checkpoints.copies_to_host = copies
        peak = Peak()
        checkpoints.begin(tensors, lambda path: path.mkdir(), TrainState(step=step))
        checkpoints.finish(wait=True)
        print(peak)
    for tensor in tensors.values():
        tensor.zero_()
    peak = Peak()
    load_tensors(directory / "step-00000002", tensors)
    print(peak)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors.values()))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
