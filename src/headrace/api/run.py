"""A run as an object: its settings, metrics, rollouts, checkpoints and plots, and its progress while it runs."""

from __future__ import annotations

import asyncio
import difflib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from headrace.errors import BadInput, Failure
from headrace.launch.run_directory import LAUNCHER, checkpoints, find_run, in_use
from headrace.observe.chart import comparison_chart
from headrace.observe.metrics import Record, Tail
from headrace.observe.summary import Summary, format_summary, read_history, summarize
from headrace.transport.epochs import is_here, newest_lease
from headrace.transport.run_dir import RolloutKind, RunDir
from headrace.transport.verification import Verification

if TYPE_CHECKING:
    import pyarrow as pa

    from headrace.runfile.run import AnyRun
    from headrace.tools.audit import AuditReport

POLL_S = 0.25
REWARD = "reward/all/mean"


class RunFailed(Failure):
    """The run ended with an error. The message has the end of its output."""


class Event(NamedTuple):
    """Something that a run has recorded."""

    kind: Literal["batch", "step", "evaluation"]
    """`batch`: the orchestrator shipped the batch of a step; `step`: the trainer made it; `evaluation` of a version."""
    step: int
    values: Record
    """The metrics, by name."""


class Events:
    """The events of a run from its first step, until it has ended; for `for` and for `async for`."""

    def __init__(
        self, metrics: Path, is_over: Callable[[], bool], is_stale: Callable[[], bool] = lambda: False
    ) -> None:
        self._tail, self._is_over, self._is_stale = Tail(metrics), is_over, is_stale

    def _read(self) -> list[Event] | None:
        """Return the new events; None once the run is over and all of its events were returned."""
        over = self._is_over()  # before the last records are read
        records = [] if self._is_stale() else self._tail.read()
        events = [event for record in records for event in _events_of(record)]
        return None if over and not events else events

    def __iter__(self) -> Iterator[Event]:
        while (events := self._read()) is not None:
            yield from events
            time.sleep(0 if events else POLL_S)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while (events := await asyncio.to_thread(self._read)) is not None:
            for event in events:
                yield event
            await asyncio.sleep(0 if events else POLL_S)


class Plot:
    """A chart that a notebook shows; `str` and `save` give its SVG."""

    def __init__(self, svg: str) -> None:
        self._svg = svg

    def __str__(self) -> str:
        return self._svg

    def _repr_svg_(self) -> str:
        return self._svg

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(self._svg, encoding="utf-8")


class Run:
    """A run directory. The run may be running, finished, stopped or dead; reading changes nothing.

    Give the directory, or its config.toml.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.files = RunDir(find_run(Path(path)))

    @property
    def path(self) -> Path:
        return self.files.root

    @property
    def config(self) -> AnyRun:
        """The resolved configuration."""
        from headrace.launch.saved_config import read_run  # the types of run files take a second

        return read_run(self.path)

    @property
    def state(self) -> str:
        """`running`, `finished`, `stopped`, `failed`, `silent` (its launcher stopped writing) or `unknown`."""
        return self._state()[0]

    def summary(self) -> Summary:
        """Return the numbers of `headrace summary`."""
        return summarize(self.files)

    def metrics(self, *names: str) -> pa.Table:
        """Return these metrics, or all, with one row per step; `.to_pandas()` makes it a DataFrame.

        A step that was trained again after a resume has its last values. Evaluations are in `evaluations`.
        """
        import pyarrow as pa

        history = read_history(self.files)
        steps = sorted({*history.steps, *history.trained})
        rows = [{**history.steps.get(step, {}), **history.trained.get(step, {}), "step": step} for step in steps]
        names_of_rows = dict.fromkeys(name for row in rows for name in row)
        if missing := [name for name in names if name not in names_of_rows]:
            near = difflib.get_close_matches(missing[0], names_of_rows, n=3, cutoff=0.5)
            fix = f"Did you mean {' or '.join(near)}?" if near else "Run.metrics() without names returns all."
            raise BadInput("not a metric of this run", key="metric", value=missing[0], fix=fix)
        columns = ["step", *names] if names else sorted(names_of_rows, key=lambda name: (name != "step", name))
        return pa.table({name: [row.get(name) for row in rows] for name in columns})

    def evaluations(self) -> pa.Table:
        """Return the evaluations: environment, step (policy version), score (avg@k) and share of failed episodes."""
        import pyarrow as pa

        history = read_history(self.files)
        rows = [
            {"environment": name, "step": step, "score": history.evals.get(name, {}).get(step), "failed": failed}
            for name, versions in history.eval_failures.items()
            for step, failed in versions.items()
        ]
        kinds = {"environment": pa.string(), "step": pa.int64(), "score": pa.float64(), "failed": pa.float64()}
        return pa.Table.from_pylist(rows, schema=pa.schema(list(kinds.items())))

    def rollouts(self, step: int | None = None, *, evaluation: bool = False) -> pa.Table:
        """Return the saved rollouts of a step, the newest by default; of an evaluated version with `evaluation`."""
        import pyarrow.parquet as pq

        saved = (RolloutKind.EVAL if evaluation else RolloutKind.TRAIN).files(self.files.rollouts)
        if not saved or (step is not None and step not in saved):
            fix = f"Saved: {', '.join(map(str, saved)) or 'none'}. A run keeps orchestrator.keep_rollouts steps."
            raise BadInput("no rollouts of this step are saved", key="step", value=step, fix=fix)
        return pq.read_table(saved[max(saved) if step is None else step])

    def checkpoints(self) -> dict[int, Path]:
        """Return the complete checkpoints by step, oldest first."""
        return checkpoints(self.path)

    @property
    def model(self) -> Path:
        """The final model, or the final adapter of a run that saved it alone. Raises `BadInput` before the end."""
        for path in (self.files.final_model, self.files.final_adapter):
            if path.is_dir():
                return path
        fix = f"Wait for its end, or write a checkpoint as a model with `headrace export {self.path} DIR`."
        raise BadInput("the run has no final model", value=self.path, fix=fix)

    def plot(self, *names: str) -> Plot:
        """Return a chart of these metrics over the steps; by default of the training reward, or of the loss."""
        if not names:
            table = self.metrics()
            names = (REWARD if REWARD in table.column_names else "loss",)
        table = self.metrics(*names)
        steps = table["step"].to_pylist()
        curves = {
            name: [[(s, v) for s, v in zip(steps, table[name].to_pylist(), strict=True) if v is not None]]
            for name in names
        }
        return Plot(comparison_chart(self.path.name, curves, what=names[0] if len(names) == 1 else ""))

    def audit(self) -> AuditReport:
        """Account for every prompt of the run, and check its journal and checkpoints."""
        from headrace.tools.audit import audit_run

        with ThreadPoolExecutor(1) as thread:  # it runs an event loop, and a notebook has one already
            return thread.submit(audit_run, self.files).result()

    def verify(self) -> Verification:
        """Compare all files of the run with their digests."""
        from headrace.config.files import has_digest
        from headrace.transport.verification import verify

        return verify(self.files, has_digest)

    def events(self) -> Events:
        """Return an iterator over the run's batches, steps and evaluations, from the first on until the run ends."""
        return Events(self.files.metrics, self._is_over)

    def stop(self) -> None:
        """Ask the run to stop in order; it can be resumed. Returns at once: see `wait`."""
        lease = newest_lease(self.path, LAUNCHER)
        if lease is None or lease.released or not in_use(self.path):
            raise BadInput("the run is not running", value=self.path)
        if not is_here(lease.holder):
            fix = f"Stop {lease.holder} there."
            raise BadInput("its launcher is on another host", value=self.path, fix=fix)
        os.kill(lease.holder.pid, signal.SIGTERM)

    def wait(self) -> Run:
        """Wait until the run has ended, and return it. Raises `RunFailed`."""
        while not self._is_over():
            time.sleep(POLL_S)
        self._raise_failure()
        return self

    async def finished(self) -> Run:
        """Wait as `wait` does, without blocking the event loop."""
        while not await asyncio.to_thread(self._is_over):
            await asyncio.sleep(POLL_S)
        self._raise_failure()
        return self

    def _state(self) -> tuple[str, str | None]:
        from headrace.tools.view.runs import run_state

        return run_state(self.files)

    def _is_over(self) -> bool:
        return not in_use(self.path)

    def _raise_failure(self) -> None:
        state, problem = self._state()
        if state == "failed":
            raise RunFailed(f"{self.path}: {problem or 'the run failed'}")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.state})"

    def __str__(self) -> str:
        return format_summary(self.files, self.summary()) if self.files.metrics.is_file() else repr(self)


def _events_of(record: Record) -> Iterator[Event]:
    if REWARD in record:  # the last record of a run has totals alone
        yield Event("batch", record["step"], record)
    if "loss" in record:
        yield Event("step", record["step"], record)
    if any(name.startswith("eval/") and "/avg@" in name for name in record):
        yield Event("evaluation", record["step"], record)
