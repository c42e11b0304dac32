"""A step in one file: an uncompressed tar of a run directory that has nothing but what a replay of the step needs.

It has the state right before the step, so that another machine trains one step and rounding does not add up. The first
member, `bundle.json`, has digests of the others. The folder `base` is the model below an adapter, or a reference's.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Literal

import msgspec

from headrace.launch.saved_config import pin, read_rl_run, save
from headrace.rollout.digest import seal
from headrace.rollout.schema import SCHEMA, DamagedFile, decode_versioned
from headrace.runfile.run import RunConfig
from headrace.text.hub import model_directory
from headrace.tools.replay.source import with_overrides
from headrace.transport.adapter import CONFIG, is_adapter
from headrace.transport.checkpoint_files import read_marker
from headrace.transport.digests import check_file, file_digest
from headrace.transport.files import MARKER, move, temporary, write_atomically
from headrace.transport.platform import Platform
from headrace.transport.run_dir import RunDir

MANIFEST = "bundle.json"
BASE = "base"
PARTS = {MANIFEST, "config.toml", "platform.json", "metrics.jsonl", "batches", "checkpoints", "tokens", BASE}
"""Files and folders of a bundle; others are left out, so that one from elsewhere brings no code."""
MODEL = "model"
"""The folder of a checkpoint with the files of its model."""

Origin = Literal["run", "replay"]


class Manifest(msgspec.Struct):
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


def write_bundle(target: Path, packed: RunDir, config: RunConfig, manifest: Manifest) -> None:
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


def unpack(bundle: Path, directory: Path) -> Manifest:
    """Extract a bundle as a run directory; raise `DamagedFile` with the name of a member that is not as written."""
    try:
        with tarfile.open(bundle, "r:") as tar:
            tar.extractall(directory, [each for each in tar if each.name.split("/")[0] in PARTS], filter="data")
        header = (directory / MANIFEST).read_bytes()
    except (tarfile.TarError, FileNotFoundError) as error:
        raise DamagedFile(f"not a readable bundle: {error}", file=bundle) from error
    manifest = decode_versioned(header, Manifest, f"{bundle} ({MANIFEST})")
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
        _adopt_base(checkpoint, base)
    return manifest


def _adopt_base(checkpoint: Path, base: Path) -> None:
    """Make an adapter's checkpoint name the unpacked base, which is checked when it is loaded."""
    path = checkpoint / MODEL / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(base)}))
    marker = read_marker(checkpoint)
    marker.files[f"{MODEL}/{CONFIG}"] = file_digest(path)
    write_atomically(checkpoint / MARKER, seal(marker))
