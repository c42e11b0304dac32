"""Checkpoints: `step-00000050/` with every tensor of model and optimizer, the model's other files and the counters.

A resumed run repeats an uninterrupted one bit for bit on a CPU. The learning rate is a function of the step and has no
state. Each rank writes its shards asynchronously as safetensors with their offsets, which any number of ranks can read.
No pickle.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import msgspec
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from headrace.errors import BadInput
from headrace.rollout.batch import SCHEMA, decode_versioned
from headrace.rollout.fingerprint import Fingerprint
from headrace.trainer.ranks import Ranks
from headrace.transport.files import MARKER, link_tree, sync

MODEL = "model"
TENSORS = "tensors"
STATE = "state.json"
PERMANENT = "permanent"


class ResumeError(BadInput):
    """The run cannot start or resume from this checkpoint."""


class TrainState(msgspec.Struct):
    """Progress of training. `examples` is the position in the data of SFT, `data` the fingerprint of its rows."""

    step: int = 0
    incarnation: int = 0
    tokens_trained: int = 0
    skipped_steps: int = 0
    examples: int = 0
    data: Fingerprint | None = None
    schema: int = SCHEMA


class _Marker(msgspec.Struct):
    step: int
    schema: int = SCHEMA


class Checkpoints:
    """The `checkpoints/` directory of a run. Every rank makes the same calls; one checkpoint is written at a time."""

    def __init__(self, directory: Path, ranks: Ranks, *, keep_last: int, permanent_interval: int | None = None) -> None:
        self.directory, self.ranks = directory, ranks
        self.keep_last, self.permanent_interval = keep_last, permanent_interval
        self._group = dist.new_group(backend="gloo")  # another one, for use by another thread
        self._unfinished: tuple[int, Path, DefaultStager, Future[Any]] | None = None
        """Step and draft of the checkpoint that is being written by a thread, from a copy."""
        if ranks.first:
            sweep(directory)
            sweep(directory / PERMANENT)

    def begin(self, tensors: dict[str, Tensor], write_files: Callable[[Path], None], state: TrainState) -> None:
        """Copy the tensors and start to write them asynchronously, after the previous checkpoint is complete."""
        self.finish(wait=True)
        draft = self.directory / f".{_name(state.step)}.tmp"
        if self.ranks.first:
            (draft / TENSORS).mkdir(parents=True)
            write_files(draft / MODEL)
            (draft / STATE).write_bytes(msgspec.json.encode(state))
        self.ranks.wait_for_all()
        stager = DefaultStager(StagingOptions(False, False, False, False))
        writer = HuggingFaceStorageWriter(str(draft / TENSORS), save_distributed=True)
        saving = async_save(tensors, storage_writer=writer, async_stager=stager, process_group=self._group)
        self._unfinished = state.step, draft, stager, cast(Future[Any], saving)

    def finish(self, *, wait: bool = False) -> int | None:
        """Complete the checkpoint that is being written, if all ranks have written their shards; return its step."""
        if self._unfinished is None:
            return None
        step, draft, stager, saving = self._unfinished
        if not (wait or self.ranks.all(saving.done())):
            return None
        saving.result()
        stager.close()
        self.ranks.wait_for_all()
        if self.ranks.first:
            self._complete(step, draft)
        self.ranks.wait_for_all()
        self._unfinished = None
        return step

    def _complete(self, step: int, draft: Path) -> None:
        """Publish a draft atomically; then delete all but the newest `keep_last`."""
        (draft / MARKER).write_bytes(msgspec.json.encode(_Marker(step)))
        for path in (*draft.rglob("*"), draft):
            if path.parent.name != TENSORS:  # tensors are fsynced when written
                sync(path)
        final = self.directory / _name(step)
        if self.permanent_interval is not None and step % self.permanent_interval == 0:
            # Before the rename: a complete checkpoint is never saved again.
            link_tree(draft, self.directory / PERMANENT / final.name)
        if final.exists():
            _delete(final)
        os.replace(draft, final)
        sync(self.directory)
        for old in complete(self.directory)[: -self.keep_last]:
            _delete(old)


def sweep(directory: Path) -> None:
    """Delete incomplete checkpoints left by a killed trainer."""
    for path in (*directory.glob(".step-*"), *directory.glob("step-*")):
        if path.name.startswith(".") or not (path / MARKER).is_file():
            shutil.rmtree(path)


def complete(directory: Path) -> list[Path]:
    """Return complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob("step-*") if (path / MARKER).is_file())


def latest(directory: Path) -> Path | None:
    """Return the newest complete checkpoint, if there is one."""
    return max(complete(directory), default=None)


def read_state(checkpoint: Path) -> TrainState:
    """Return the state of a complete checkpoint."""
    if not (checkpoint / MARKER).is_file():
        raise FileNotFoundError(f"{checkpoint} has no {MARKER}: it is not a checkpoint, or incomplete")
    return decode_versioned((checkpoint / STATE).read_bytes(), TrainState, str(checkpoint / STATE))


def starting_point(checkpoints: Path, resume: str | None) -> Path | None:
    """Return the checkpoint to start from: None, the newest one, or the one that `resume` names."""
    newest = latest(checkpoints)
    if resume is None:
        if newest is not None:
            fact = f"the run already has checkpoints, the newest {newest.name}"
            fix = "Resume the run, or choose another output_dir."
            raise ResumeError(fact, key="output_dir", value=checkpoints.parent, fix=fix)
        return None
    if resume == "latest":
        return newest
    chosen = Path(resume)
    read_state(chosen)
    if newest is not None and chosen.parent.resolve() == checkpoints.resolve() and chosen.name != newest.name:
        fact = f"not the newest checkpoint of its run ({newest.name} is)"
        fix = "To go back on purpose, start a run with another output_dir from it."
        raise ResumeError(fact, key="--resume", value=chosen, fix=fix)
    return chosen


def saved_names(checkpoint: Path) -> Collection[str]:
    """Return the names of a checkpoint's tensors."""
    try:
        return HuggingFaceStorageReader(str(checkpoint / TENSORS)).read_metadata().state_dict_metadata.keys()
    except SafetensorError as error:
        fact = f"the checkpoint is damaged: {error}"
        raise BadInput(fact, file=checkpoint, fix="Move it away to resume from the checkpoint before it.") from error


def load_tensors(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """Read tensors in place, each rank its shards; all must be in the checkpoint. Every rank must call it."""
    load(tensors, storage_reader=HuggingFaceStorageReader(str(checkpoint / TENSORS)))


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _delete(checkpoint: Path) -> None:
    (checkpoint / MARKER).unlink()  # first, so that a partly deleted checkpoint is incomplete
    shutil.rmtree(checkpoint)
