"""The replay of a step: every step since the nearest checkpoint is trained again, the last one with its tokens."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.errors import BadInput
from headrace.launch.saved_config import save
from headrace.observe.token_view import read_tokens
from headrace.rollout.batch import Batch, encode_batch
from headrace.rollout.schema import DamagedFile
from headrace.text.hub import model_directory
from headrace.text.tokenizer import Tokenizer
from headrace.tools.common import ReportProgress
from headrace.tools.replay.report import ReplayReport, compare_metrics, compare_tokens, dissect
from headrace.tools.replay.source import BundleManifest, ReplaySource, open_run, unpack, with_overrides, write_bundle
from headrace.transport.digests import check_directory
from headrace.transport.files import write_atomically
from headrace.transport.platform import Platform, read_platform
from headrace.transport.run_dir import ExportHeader, RunDir

if TYPE_CHECKING:
    from headrace.trainer.replay import Replay, TracedStep

DEFAULT_TOLERANCE = 1e-5
DEFAULT_ROLLOUTS = 10
DTYPE = "--trainer.model.dtype"


def replay_step(
    path: Path,
    step: int | None,
    *,
    overrides: Sequence[str] = (),
    tolerance: float = DEFAULT_TOLERANCE,
    top: int = DEFAULT_ROLLOUTS,
    bundle: Path | None = None,
    progress: ReportProgress = lambda what, done=0, total=0: None,
) -> ReplayReport:
    """Train a step of a run, or of a bundle, again and compare it with the record; write `bundle` if it is set.

    `top`: rollouts in the report, those with the largest shares of the gradient.
    """
    if bundle is not None and not bundle.absolute().parent.is_dir():
        raise BadInput("its folder does not exist", key="--bundle", value=bundle, fix="Create it first.")
    beside = None if bundle is None else bundle.absolute().parent  # a bundle may not fit into /tmp
    with TemporaryDirectory(prefix=".headrace-replay-", dir=beside) as scratch:
        manifest, folder = None, path
        if path.is_file() and tarfile.is_tarfile(path):
            progress(f"unpacking {path.name}")
            folder = Path(scratch, "unpacked")
            manifest = unpack(path, folder)
            step = manifest.step
        if step is None:
            raise BadInput("missing", key="STEP", fix="Give the step of the run to replay.")
        recorded = read_platform(RunDir(folder).platform) or (None if manifest is None else manifest.platform)
        chosen = any(word.startswith(DTYPE) for word in overrides)
        if recorded is not None and recorded.dtype == "float32" and not chosen:  # `auto` is bfloat16 on a GPU
            overrides = [DTYPE, "float32", *overrides]
        source = open_run(folder, step, overrides)
        packed = RunDir(Path(scratch, "packed"))
        from headrace.trainer.replay import Replay

        progress("loading the model")
        threads = None if recorded is None else recorded.threads
        replay = Replay(source.config.trainer, source.start, packed.checkpoints, threads)
        differing, other_batches = _catch_up(replay, source, progress)
        if bundle is not None:
            replay.save()
        progress(f"training step {step}")
        batch = _checked_batch(source, step, other_batches)
        traced, platform = replay.trace(batch), replay.learner.platform
        header, tokens = _recorded_tokens(source.run, step)
        metrics = compare_metrics(source.recorded.get(step, {}), traced.metrics)
        if bundle is not None:
            progress(f"writing {bundle.name}")
            complete = header is not None and header.sequences is None
            _pack(bundle, packed, source, batch, traced, tokens if complete else None, platform)
        start = source.config.trainer.model.name if source.start is None else source.start.relative_to(source.run.root)
        return ReplayReport(
            run=str(path),
            step=step,
            start=str(start),
            first=source.first,
            tolerance=tolerance,
            platform=platform,
            recorded_platform=recorded,
            replayed=traced.metrics,
            metrics=metrics,
            tokens=[] if tokens is None else compare_tokens(tokens, traced.tokens),
            tokens_from="" if tokens is None else "run" if manifest is None else manifest.tokens_from,
            first_differing_step=differing or (step if any(pair.error for pair in metrics) else None),
            other_batches=other_batches,
            anatomy=dissect(traced, top, partial(_text, source)),
        )


def _text(source: ReplaySource, token: int) -> str:
    folder = model_directory(str(source.config.trainer.model.name))
    return Tokenizer(folder).decode([token]) if (folder / "tokenizer.json").is_file() else f"token {token}"


def _catch_up(replay: Replay, source: ReplaySource, progress: ReportProgress) -> tuple[int | None, list[int]]:
    """Train the steps before the one to replay; return the first whose metrics differ, and batches that differ."""
    differing: int | None = None
    other_batches: list[int] = []
    for step in range(source.first, source.step):
        progress("training the steps before", step - source.first + 1, source.step - source.first)
        metrics = replay.train(_checked_batch(source, step, other_batches))
        pairs = compare_metrics(source.recorded.get(step, {}), metrics)
        if differing is None and any(pair.error for pair in pairs):
            differing = step
    return differing, other_batches


def _checked_batch(source: ReplaySource, step: int, other_batches: list[int]) -> Batch:
    batch = source.batch(step)
    if source.is_as_shipped(batch) is False:
        other_batches.append(step)
    return batch


def _recorded_tokens(run: RunDir, step: int) -> tuple[ExportHeader | None, pa.Table | None]:
    """Return what the run exported of the step's tokens, if anything."""
    if step not in run.tokens.steps():
        return None, None
    for check in check_directory(run.tokens.path(step)):
        if isinstance(check, DamagedFile):
            raise check
    return read_tokens(run.tokens, step)


def _pack(
    target: Path,
    packed: RunDir,
    source: ReplaySource,
    batch: Batch,
    traced: TracedStep,
    recorded_tokens: pa.Table | None,
    platform: Platform,
) -> None:
    """Write the bundle of a step; `packed` has its checkpoint. What the run did not record is that of this replay."""
    step, metrics = source.step, source.recorded.get(source.step)
    config = with_overrides(source.config, [DTYPE, platform.dtype])  # the same on any device
    save(config, packed)
    if source.run.platform.is_file():
        shutil.copyfile(source.run.platform, packed.platform)
    record: dict[str, Any] = metrics or {"step": step, "time": 0, "process": "trainer", **traced.metrics}
    write_atomically(packed.metrics, msgspec.json.encode(record) + b"\n")
    write_atomically(packed.batches.path(step), encode_batch(batch))
    packed.tokens.path(step).mkdir(parents=True)
    table = traced.tokens if recorded_tokens is None else recorded_tokens
    pq.write_table(table, packed.tokens.path(step) / "part-0.parquet", compression="zstd")
    manifest = BundleManifest(
        step, platform, "run" if metrics else "replay", "replay" if recorded_tokens is None else "run", {}
    )
    write_bundle(target, packed, config, manifest)
