"""Checkpoints: `step-00000050/` with a Hugging Face model, the optimizer's moments and the counters of the run.

Everything that decides the next step is in there, so a resumed run repeats an uninterrupted one bit for bit on a CPU.
The learning rate is a function of the step and needs no state of its own. No pickle: safetensors and JSON.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from headrace.rollout.batch import SCHEMA, decode_versioned
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer
from headrace.transport.files import write_directory

MARKER = "COMPLETE.json"
MODEL = "model"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"


class TrainState(msgspec.Struct):
    """What has been done so far. `examples` is the position in the data of supervised training."""

    step: int = 0
    incarnation: int = 0
    tokens_trained: int = 0
    skipped_steps: int = 0
    examples: int = 0
    schema: int = SCHEMA


class _Marker(msgspec.Struct):
    step: int
    schema: int = SCHEMA


def save(directory: Path, model: PackedModel, optimizer: Optimizer, state: TrainState, keep_last: int) -> Path:
    """Write the checkpoint of `state.step`, whole or not at all, then delete all but the newest few."""

    def fill(draft: Path) -> None:
        model.save(draft / MODEL, torch.float32)
        save_file(optimizer.state_tensors(), draft / OPTIMIZER)
        (draft / STATE).write_bytes(msgspec.json.encode(state))
        (draft / MARKER).write_bytes(msgspec.json.encode(_Marker(state.step)))

    sweep(directory)
    path = directory / f"step-{state.step:08d}"
    write_directory(path, fill)
    for old in complete(directory)[:-keep_last]:
        (old / MARKER).unlink()  # first, so that a half-deleted one is not taken for complete
        shutil.rmtree(old)
    return path


def sweep(directory: Path) -> None:
    """Remove what a trainer left behind that was killed while saving a checkpoint or deleting an old one."""
    for path in (*directory.glob(".step-*"), *directory.glob("step-*")):
        if path.name.startswith(".") or not (path / MARKER).is_file():
            shutil.rmtree(path)


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob("step-*") if (path / MARKER).is_file())


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint, if there is one."""
    return max(complete(directory), default=None)


def read_state(checkpoint: Path) -> TrainState:
    """The counters of a complete checkpoint."""
    if not (checkpoint / MARKER).is_file():
        raise FileNotFoundError(f"{checkpoint} has no {MARKER}: it is not a checkpoint, or not a complete one")
    return decode_versioned((checkpoint / STATE).read_bytes(), TrainState, str(checkpoint / STATE))


def load_optimizer(checkpoint: Path, optimizer: Optimizer) -> None:
    optimizer.load_state_tensors(load_file(checkpoint / OPTIMIZER))
