"""Checkpoints: `step-00000050/` with every tensor of model and optimizer, the model's other files and the counters.

Everything that decides the next step is in there, so a resumed run repeats an uninterrupted one bit for bit on a CPU.
The learning rate is a function of the step and needs no state of its own. Each rank writes what it has, beside
training, as safetensors that say which part of a tensor they hold: any number of ranks reads them. No pickle.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import msgspec
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


class TrainState(msgspec.Struct):
    """What has been done so far. `examples` is the position in the data of supervised training, `data` its rows."""

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
    """The `checkpoints/` of a run. Every rank has one and makes the same calls; one checkpoint is written at a time."""

    def __init__(self, directory: Path, ranks: Ranks, *, keep_last: int, permanent_interval: int | None = None) -> None:
        self.directory = directory
        self.ranks = ranks
        self.keep_last = keep_last
        self.permanent_interval = permanent_interval
        self._group = ranks.group_beside()
        self._unfinished: _Unfinished | None = None
        if ranks.first:
            sweep(directory)
            sweep(directory / PERMANENT)

    def begin(self, tensors: dict[str, Tensor], write_files: Callable[[Path], None], state: TrainState) -> None:
        """Copy the tensors, then write them beside whatever comes next. Waits for the checkpoint before this one."""
        self.finish(wait=True)
        draft = self.directory / f".{_name(state.step)}.tmp"
        if self.ranks.first:
            (draft / TENSORS).mkdir(parents=True)
            write_files(draft / MODEL)
            (draft / STATE).write_bytes(msgspec.json.encode(state))
        self.ranks.wait_for_all()
        self._unfinished = _Unfinished(state.step, draft, tensors, self._group)

    def finish(self, *, wait: bool = False) -> int | None:
        """Complete the checkpoint that is being written, if all ranks have written theirs. Returns its step."""
        unfinished = self._unfinished
        if unfinished is None or not (wait or self.ranks.all(unfinished.written.done())):
            return None
        unfinished.wait()
        self.ranks.wait_for_all()
        if self.ranks.first:
            self._complete(unfinished.step, unfinished.draft)
        self.ranks.wait_for_all()
        self._unfinished = None
        return unfinished.step

    def _complete(self, step: int, draft: Path) -> None:
        """Make a draft visible, whole or not at all; then delete all but the newest few."""
        (draft / MARKER).write_bytes(msgspec.json.encode(_Marker(step)))
        for path in (*draft.rglob("*"), draft):
            if path.parent.name != TENSORS:  # those were made durable as they were written
                sync(path)
        final = self.directory / _name(step)
        if self.permanent_interval is not None and step % self.permanent_interval == 0:
            # First: what is complete is continued from, and never saved again.
            link_tree(draft, self.directory / PERMANENT / final.name)
        if final.exists():
            _delete(final)
        os.replace(draft, final)
        sync(self.directory)
        for old in complete(self.directory)[: -self.keep_last]:
            _delete(old)


class _Unfinished:
    """A checkpoint whose tensors are being written by a thread, from a copy."""

    def __init__(self, step: int, draft: Path, tensors: dict[str, Tensor], group: Any) -> None:
        self.step, self.draft = step, draft
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        saving = async_save(
            tensors,
            storage_writer=HuggingFaceStorageWriter(str(draft / TENSORS), save_distributed=True),
            async_stager=self._stager,
            process_group=group,
        )
        self.written = cast(Future[Any], saving)

    def wait(self) -> None:
        self.written.result()
        self._stager.close()


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


def saved_names(checkpoint: Path) -> Collection[str]:
    """The tensors of a checkpoint."""
    try:
        return HuggingFaceStorageReader(str(checkpoint / TENSORS)).read_metadata().state_dict_metadata.keys()
    except SafetensorError as error:
        raise BadInput(
            f"the checkpoint is damaged ({error})",
            file=checkpoint,
            fix="Move it away, and --resume goes on from the one before it.",
        ) from error


def load_tensors(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """Read tensors in place, each rank the parts that it has; every one of them must be in the checkpoint.

    Every rank must call it.
    """
    load(tensors, storage_reader=HuggingFaceStorageReader(str(checkpoint / TENSORS)))


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _delete(checkpoint: Path) -> None:
    (checkpoint / MARKER).unlink()  # first, so that a half-deleted one is not taken for complete
    shutil.rmtree(checkpoint)
