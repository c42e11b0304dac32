"""What a replay begins with: the settings of a run, the nearest checkpoint before the step, and the batches since.

A run deletes the batches that a checkpoint covers. Their samples are in the rollout files to the last bit: a batch is
made again from them, and the digest that the journal recorded of it shows that it is the same.

A bundle is a step in one file: an uncompressed tar of a run directory that has nothing but what a replay of the step
needs. It has the state right before the step, so that another machine trains one step and rounding does not add up. The
first member, `bundle.json`, has digests of the others. The folder `base` is the model below an adapter, or a
reference's.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from headrace.errors import BadInput
from headrace.launch.own_code import add_code_folders_of
from headrace.launch.run_directory import checkpoints
from headrace.launch.saved_config import pin, read_rl_run, save
from headrace.observe.metrics import History, Record, read_metrics
from headrace.rollout.batch import Batch, batch_of, encode_batch
from headrace.rollout.digest import digest_of, seal
from headrace.rollout.schema import SCHEMA, DamagedFile, decode_versioned
from headrace.runfile.reading import parse_overrides, put, validate
from headrace.runfile.run import SHARED, RunConfig
from headrace.text.hub import model_directory
from headrace.transport.adapter import CONFIG, is_adapter
from headrace.transport.checkpoint_files import read_marker
from headrace.transport.digests import check_file, file_digest
from headrace.transport.files import MARKER, move, temporary, write_atomically
from headrace.transport.journal import Journal
from headrace.transport.platform import Platform
from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.run_dir import RunDir


@dataclass(frozen=True)
class ReplaySource:
    """A run, or an unpacked bundle, and the step to replay."""

    run: RunDir
    config: RunConfig
    step: int
    start: Path | None
    """The checkpoint; None: the model that the run began with."""
    first: int
    """The first step that is trained again."""

    @cached_property
    def recorded(self) -> dict[int, Record]:
        """The trainer's metrics by step."""
        return History(read_metrics(self.run.metrics)).trained

    @cached_property
    def shipped(self) -> dict[str, str]:
        """Digests of batches in the journal, by their path."""
        if not self.run.journal.is_file():
            return {}
        with closing(Journal(self.run.journal, read_only=True)) as journal:
            return {name: record.digest for name, record in journal.files().items()}

    def batch(self, step: int) -> Batch:
        """Return the batch of a step; raise `DamagedFile` if the file that has it is damaged."""
        if self.run.batches.exists(step):
            return self.run.batches.read(step)
        kept = [saved.rollout for saved in RolloutFiles(self.run.rollouts).read(step) if not saved.drop_reason]
        return batch_of(step, 0, kept)

    def is_as_shipped(self, batch: Batch) -> bool | None:
        """Return whether a batch has the digest that the journal recorded; None: it recorded none."""
        path = self.run.batches.path(batch.step)
        digest = self.shipped.get(f"{path.parent.name}/{path.name}")
        if digest is None:
            return None
        newest = int(self.recorded.get(batch.step, {}).get("progress/incarnation") or batch.incarnation)
        # The batch has the incarnation of the weights when it was shipped, which no other file has.
        candidates = (replace(batch, incarnation=number) for number in range(newest + 1))
        return any(digest_of(encode_batch(candidate)) == digest for candidate in candidates)


def open_run(path: Path, step: int, overrides: Sequence[str] = ()) -> ReplaySource:
    """Find what a replay of `step` needs; raise `BadInput` with the key that would have kept what is gone."""
    config = with_overrides(read_rl_run(path), overrides)
    assert config.output_dir is not None  # `read_rl_run` sets it
    run = RunDir(config.output_dir)
    add_code_folders_of(run)
    available = {*run.batches.steps(), *RolloutFiles(run.rollouts).steps()}
    if not 1 <= step <= max(available, default=0):
        fact = f"the run has batches of steps {min(available)} to {max(available)}" if available else "no step is saved"
        fix = "Give one of these steps." if available else None
        raise BadInput(fact, key="STEP", value=step, file=run.root, fix=fix)
    before = {number: place for number, place in checkpoints(run.root).items() if number < step}
    first = max(before, default=0) + 1
    if missing := [number for number in range(first, step + 1) if number not in available]:
        since = (
            f"since the checkpoint of step {first - 1}" if before else "from the beginning: no checkpoint is before it"
        )
        fact = f"step {step} needs the batches {since}, and that of step {missing[0]} is gone"
        fix = "Set it to the steps to keep, and trainer.ckpt.permanent_interval to keep a checkpoint before them."
        raise BadInput(fact, key="orchestrator.keep_rollouts", value=config.orchestrator.keep_rollouts, fix=fix)
    return ReplaySource(run, config, step, before.get(first - 1), first)


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the settings with `--trainer.key value` replaced, also where other sections share the key."""
    tree = config.model_dump(mode="json", exclude_none=True)
    for path, value in parse_overrides(overrides):
        key = ".".join(path)
        if path[0] != "trainer":
            raise BadInput("a replay runs the trainer alone", key=f"--{key}", fix="Write --trainer.key value.")
        copies = [
            copy + key.removeprefix(target)
            for source, targets in SHARED.items()
            for target in targets
            if f"{key}.".startswith(f"{target}.")
            for copy in (source, *targets)
        ]
        for place in (key, *copies):
            put(tree, place.split("."), value)
    return validate(RunConfig, tree, "command line")[0] if overrides else config


MANIFEST = "bundle.json"
BASE = "base"
PARTS = {MANIFEST, "config.toml", "platform.json", "metrics.jsonl", "batches", "checkpoints", "tokens", BASE}
"""Files and folders of a bundle; others are left out, so that one from elsewhere brings no code."""
MODEL = "model"
"""The folder of a checkpoint with the files of its model."""

Origin = Literal["run", "replay"]


class BundleManifest(msgspec.Struct):
    """The content of `bundle.json`."""

    step: int
    platform: Platform
    """What wrote the bundle."""
    metrics_from: Origin
    """Whether the run recorded the metrics, or the replay that wrote the bundle."""
    tokens_from: Origin
    files: dict[str, str]
    """Digests by path."""
    schema: int = SCHEMA


def write_bundle(target: Path, packed: RunDir, config: RunConfig, manifest: BundleManifest) -> None:
    """Write the files of `packed`, a directory with the parts of a run, and the base model if the trainer needs it."""
    files = {
        path.relative_to(packed.root).as_posix(): path for path in sorted(packed.root.rglob("*")) if path.is_file()
    }
    if (config.trainer.lora or config.trainer.reference) and config.trainer.model.name is not None:
        model = model_directory(config.trainer.model.name)
        files |= {f"{BASE}/{path.name}": path.resolve() for path in sorted(model.iterdir()) if path.is_file()}
    manifest.files = {name: file_digest(path) for name, path in files.items()}
    header = packed.root / MANIFEST
    header.write_bytes(seal(manifest))
    draft = temporary(target)
    try:
        with tarfile.open(draft, "w") as tar:
            for name, path in {MANIFEST: header, **files}.items():
                tar.add(path, name, filter=_without_owner)
        move(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def unpack(bundle: Path, directory: Path) -> BundleManifest:
    """Extract a bundle as a run directory; raise `DamagedFile` with the name of a member that is not as written."""
    try:
        with tarfile.open(bundle, "r:") as tar:
            tar.extractall(directory, [each for each in tar if each.name.split("/")[0] in PARTS], filter="data")
        header = (directory / MANIFEST).read_bytes()
    except (tarfile.TarError, FileNotFoundError) as error:
        raise DamagedFile(f"not a readable bundle: {error}", file=bundle) from error
    manifest = decode_versioned(header, BundleManifest, f"{bundle} ({MANIFEST})")
    for name, digest in manifest.files.items():
        if isinstance(damage := check_file(directory / name, digest), DamagedFile):
            raise DamagedFile(f"{name} in it is {damage.fact}", file=bundle)
    run = RunDir(directory)
    (checkpoint,) = run.checkpoints.glob("step-*")
    base = directory / BASE
    model = base if base.is_dir() else checkpoint / MODEL
    config = with_overrides(read_rl_run(directory), ["--trainer.model.trust_remote_code", "false"])
    save(pin(config, directory, str(model)), run)
    if is_adapter(checkpoint / MODEL):
        # The checkpoint names the unpacked base, which is checked when it is loaded.
        path, marker = checkpoint / MODEL / CONFIG, read_marker(checkpoint)
        path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(base)}))
        marker.files[f"{MODEL}/{CONFIG}"] = file_digest(path)
        write_atomically(checkpoint / MARKER, seal(marker))
    return manifest
