"""Progress of the runs of a sweep: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.observe.console import SafeConsole
from headrace.observe.metrics import History, Tail
from headrace.observe.status import duration
from headrace.observe.terminal import LiveRegion
from headrace.safe_text import CONTINUATION
from headrace.tools.sweep.record import State
from headrace.transport.run_dir import RunDir

REFRESH_S = 0.5
PLAIN_INTERVAL_S = 30.0
"""Time between lines about running runs where there is no terminal."""
MAX_ROWS = 20
"""Of more runs, only those that are running or have failed are shown."""
STYLES = {"running": "cyan", "failed": "red", "finished": "green", "unfinished": "yellow", "waiting": "dim"}


class RunProgress:
    """One run; `read` adds its new metrics."""

    def __init__(self, name: str, directory: Path, state: State, max_steps: int | None) -> None:
        self.name, self.state, self.max_steps = name, state, max_steps
        self.history = History()
        self._tail = Tail(RunDir(directory).metrics)
        self.read()

    def read(self) -> None:
        for record in self._tail.read():
            self.history.add(record)

    @property
    def steps(self) -> str:
        return str(self.history.step) if self.max_steps is None else f"{self.history.step}/{self.max_steps}"

    @property
    def value(self) -> str:
        """The newest reward, or the loss of supervised training."""
        if reward := self.history.train_reward():
            return f"{reward[-1][1]:.3f}"
        loss = self.history.loss()
        return f"loss {loss[-1][1]:.4f}" if loss else ""

    @property
    def time(self) -> str:
        seconds = float(self.history.latest.get("progress/seconds", self.history.elapsed))
        return duration(seconds) if seconds else ""


class SweepView:
    """Shows the progress of all runs; messages of `say` stay visible."""

    def __init__(self, title: str, runs: Sequence[RunProgress], console: Console | None = None) -> None:
        self._title, self._runs = title, runs
        self._console = console or SafeConsole()
        self._next = 0.0
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = LiveRegion(self._console) if live else None

    def show(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + (REFRESH_S if self._live is not None else PLAIN_INTERVAL_S)
        if self._live is not None:
            self._live.draw(progress_table(self._title, self._runs))
        elif running := [run for run in self._runs if run.state == "running" and run.history.step]:
            parts = [f"{run.name} {run.steps} {run.value}" for run in running]
            self.say("; ".join([count_finished(self._runs), *parts]))

    def say(self, message: str) -> None:
        if self._live is not None:
            self._live.say(message)
        else:  # soft_wrap: one line of a log file or a pipe stays one line
            self._console.print(Text(message.replace("\n", CONTINUATION)), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.finish(progress_table(self._title, self._runs))


def count_finished(runs: Sequence[RunProgress]) -> str:
    """Return `3 of 8 finished, 1 failed`."""
    failed = sum(run.state == "failed" for run in runs)
    finished = f"{sum(run.state == 'finished' for run in runs)} of {len(runs)} finished"
    return f"{finished}, {failed} failed" if failed else finished


def progress_table(title: str, runs: Sequence[RunProgress]) -> Table:
    table = Table("run", "state", title=Text(f"{title}: {count_finished(runs)}"), title_justify="left")
    for column in ("step", "reward", "time"):
        table.add_column(column, justify="right")
    for run in runs:
        if len(runs) <= MAX_ROWS or run.state in ("running", "failed"):
            table.add_row(Text(run.name), Text(run.state, style=STYLES[run.state]), run.steps, run.value, run.time)
    return table
