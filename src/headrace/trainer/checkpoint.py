"""Checkpoints: `step-00000050/` with every tensor of model and optimizer, the model's other files and the counters.

A resumed run repeats an uninterrupted one bit for bit on a CPU. The learning rate is a function of the step and has no
state. Each rank writes its shards as safetensors with their offsets, which any number of ranks can read: in the
background from one copy in host memory if that fits, else streamed to disk while training waits. The marker has digests
of the files, and a damaged one is refused. No pickle.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
from torch import Tensor

from headrace.errors import BadInput, Repaired
from headrace.machine import file_system, free_memory
from headrace.rollout.digest import Fingerprint, seal
from headrace.rollout.schema import SCHEMA, DamagedFile, decode_versioned
from headrace.trainer.host_copies import BUCKET_BYTES, STREAM_BUCKETS, fits_host
from headrace.trainer.ranks import Ranks
from headrace.trainer.tensor_files import (
    SavedShard,
    TensorFileWriter,
    load_shards,
    local_shards,
    read_shards,
    write_shards,
)
from headrace.transport.adapter import CONFIG as ADAPTER_CONFIG
from headrace.transport.checkpoint_files import STATE, TENSORS, CheckpointMarker, check_files, digests_of, read_marker
from headrace.transport.files import MARKER, STEP, discard, draft_of, link_tree, move, sync

log = logging.getLogger(__name__)

MODEL_DIR = "model"
PERMANENT_DIR = "permanent"


class ResumeError(BadInput):
    """The run cannot start or resume from this checkpoint."""


class TrainState(msgspec.Struct):
    """Progress of training. `examples` is the position in SFT or DPO data, `data` the fingerprint of its rows."""

    step: int = 0
    incarnation: int = 0
    tokens_trained: int = 0
    skipped_steps: int = 0
    examples: int = 0
    data: Fingerprint | None = None
    schema: int = SCHEMA


class Checkpoints:
    """The `checkpoints/` directory of a run. Every rank makes the same calls; one checkpoint is written at a time."""

    def __init__(self, directory: Path, ranks: Ranks, *, keep_last: int, permanent_interval: int | None = None) -> None:
        self.directory, self.ranks = directory, ranks
        self.keep_last, self.permanent_interval = keep_last, permanent_interval
        self.copies_to_host: bool | None = None
        """Whether a checkpoint is copied to host memory as a whole; None until `plan` decides it."""
        self._unfinished: tuple[int, Path, TensorFileWriter] | None = None
        """Step, draft and writer of the checkpoint that is being written."""
        self._cleaner = ThreadPoolExecutor(1, "old-checkpoints")
        self._deletions: list[Future[None]] = []
        if ranks.is_first:
            delete_incomplete(directory)
            delete_incomplete(directory / PERMANENT_DIR)

    def plan(self, size: int, free: int) -> int:
        """Decide whether copies of `size` bytes per rank fit into `free` bytes; return the bytes that a rank takes."""
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        total = ranks_here * self.ranks.max(size)
        if file_system(self.directory) == "tmpfs":
            free -= (self.keep_last + 1) * total  # files in a tmpfs take host memory too
        self.copies_to_host = self.ranks.all(fits_host(total, free))
        how = (
            "copied to host memory and written in the background"
            if self.copies_to_host
            else "streamed to disk while training waits"
        )
        left = max(0, free) / 1e9
        log.info("checkpoints of %.2f GB are %s: %.1f GB of host memory is free", total / 1e9, how, left)
        return size if self.copies_to_host else min(size, STREAM_BUCKETS * BUCKET_BYTES)

    def begin(self, tensors: dict[str, Tensor], write_files: Callable[[Path], None], state: TrainState) -> None:
        """Start to write a checkpoint, once the previous one is complete; the tensors may change after the return."""
        if self._unfinished is not None and not self._unfinished[-1].is_done:
            log.info("training waits until the checkpoint of step %d is written", self._unfinished[0])
        self.finish(wait=True)
        draft = draft_of(self.directory / _name(state.step))
        if self.ranks.is_first:
            self.directory.mkdir(parents=True, exist_ok=True)
            draft.mkdir()
            (draft / TENSORS).mkdir()
            write_files(draft / MODEL_DIR)
            (draft / STATE).write_bytes(seal(state))
        self.ranks.barrier()
        shards = local_shards(tensors, with_whole=self.ranks.is_first)
        if self.copies_to_host is None:
            self.plan(sum(shard.local.nbytes for shard in shards), free_memory())
        path = draft / TENSORS / f"shard-{self.ranks.index + 1:05d}-model-00001-of-00001.safetensors"
        writer = write_shards(path, shards, blocks=None if self.copies_to_host else STREAM_BUCKETS)
        self._unfinished = state.step, draft, writer

    def finish(self, *, wait: bool = False) -> int | None:
        """Complete the checkpoint that is being written, if all ranks have written their shards; return its step.

        `wait`: until it is complete, and until old checkpoints are deleted, which happens in the background.
        """
        step = None
        if self._unfinished is not None and (wait or self.ranks.all(self._unfinished[-1].is_done)):
            step, draft, writer = self._unfinished
            self._unfinished = None
            digests = self.ranks.gather((writer.path.name, writer.finish()))
            if self.ranks.is_first:
                self._complete(draft, CheckpointMarker(step, tensors=dict(digests), files=digests_of(draft)))
            self.ranks.barrier()
        if wait:
            while self._deletions:
                self._deletions.pop().result()
        return step

    def steps(self) -> list[int]:
        """Return the steps that a run may continue from, with that of the checkpoint that is being written."""
        saved = [*list_complete(self.directory), *list_complete(self.directory / PERMANENT_DIR)]
        steps = [int(path.name.removeprefix("step-")) for path in saved] or [0]
        return steps if self._unfinished is None else [*steps, self._unfinished[0]]

    def _complete(self, draft: Path, marker: CheckpointMarker) -> None:
        """Publish a draft atomically; then delete all but the newest `keep_last`."""
        step = marker.step
        (draft / MARKER).write_bytes(seal(marker))
        for path in (*draft.rglob("*"), draft):
            if path.parent.name != TENSORS:  # tensors are fsynced when written
                sync(path)
        final = self.directory / _name(step)
        if self.permanent_interval is not None and step % self.permanent_interval == 0:
            # Before the rename: a complete checkpoint is never saved again.
            link_tree(draft, self.directory / PERMANENT_DIR / final.name)
        if final.exists():
            discard(final)
        move(draft, final)
        sync(self.directory)
        for old in list_complete(self.directory)[: -self.keep_last]:
            (old / MARKER).unlink()  # before the rest: a partly deleted checkpoint is incomplete
            self._deletions.append(self._cleaner.submit(shutil.rmtree, old))  # a large file takes seconds


def delete_incomplete(directory: Path) -> None:
    """Delete incomplete checkpoints left by a killed trainer."""
    for path in (*directory.glob(".step-*"), *directory.glob(STEP)):
        if path.name.startswith(".") or not (path / MARKER).is_file():
            shutil.rmtree(path)


def list_complete(directory: Path) -> list[Path]:
    """Return complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob(STEP) if (path / MARKER).is_file())


def find_latest(directory: Path) -> Path | None:
    """Return the newest complete checkpoint, if there is one."""
    return max(list_complete(directory), default=None)


def read_state(checkpoint: Path) -> TrainState:
    """Return the state of a complete checkpoint, after a check of all its files except tensors."""
    marker = read_marker(checkpoint)
    check_files(checkpoint, marker)
    path = checkpoint / STATE
    if not path.is_file():
        raise DamagedFile("missing", file=path)
    state = decode_versioned(path.read_bytes(), TrainState, str(path))
    if not marker.files:
        _check_without_digests(checkpoint / MODEL_DIR)
    return state


def _check_without_digests(model: Path) -> None:
    """Raise `DamagedFile` unless the settings of a model are readable, for checkpoints of versions without digests."""
    if not any((model / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise DamagedFile("it has no settings of a model", file=model)
    for path in sorted(model.glob("*.json")):
        try:
            msgspec.json.decode(path.read_bytes(), type=dict)
        except ValueError as error:
            raise DamagedFile(f"not readable: {error}", file=path) from error


def starting_point(checkpoints: Path, resume: str | None) -> Path | None:
    """Return the checkpoint to start from: None, the newest one, or the one that `resume` names."""
    newest = find_latest(checkpoints)
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
    return {shard.name for shard in _saved_shards(checkpoint, read_marker(checkpoint))}


def load_tensors(checkpoint: Path, tensors: dict[str, Tensor]) -> None:
    """Read tensors in place, each rank its shards; all must be in the checkpoint."""
    marker = read_marker(checkpoint)
    try:
        load_shards(_saved_shards(checkpoint, marker), local_shards(tensors), marker.tensors)
    except ValueError as error:
        fact = f"the checkpoint is of another model: {error}"
        raise ResumeError(fact, file=checkpoint, fix="Resume with the model that it was saved with.") from error


def _saved_shards(checkpoint: Path, marker: CheckpointMarker) -> list[SavedShard]:
    # Checkpoints of older versions have no digests.
    names = marker.tensors or [path.name for path in (checkpoint / TENSORS).glob("*.safetensors")]
    if not names:
        raise DamagedFile("it has no tensor files", file=checkpoint / TENSORS)
    paths = sorted(checkpoint / TENSORS / name for name in names)
    return [shard for path in paths for shard in read_shards(path, marker.tensors.get(path.name))]


def set_aside(damage: DamagedFile, checkpoint: Path, checkpoints: Path, ranks: Ranks) -> Repaired:
    """Rename a damaged checkpoint if its run has an older one; return an error that makes the run resume from it.

    Raises `DamagedFile` if there is no older one. Every rank must call this.
    """
    own = list_complete(checkpoints) if checkpoint.parent == checkpoints else []
    older = [path.name for path in own if path.name < checkpoint.name]
    ranks.barrier()  # before one of them renames what the others list
    if not older:
        fix = "There is no checkpoint before it: restore it from a copy, or start the run again with --clean."
        raise DamagedFile(f"the checkpoint is damaged: {damage.fact}", file=damage.file, fix=fix) from damage
    kept = checkpoint.with_name(f"damaged-{checkpoint.name}")
    if ranks.is_first:
        shutil.rmtree(kept, ignore_errors=True)
        os.replace(checkpoint, kept)
        sync(checkpoint.parent)
    ranks.barrier()
    return Repaired(f"{damage}. The run continues from {older[-1]}; {kept} has the damaged checkpoint")


def _name(step: int) -> str:
    return f"step-{step:08d}"
