"""How far each run of a sweep has come: a table that is redrawn, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.observe.metrics import History, Tail
from headrace.observe.summary import duration
from headrace.observe.terminal import LiveRegion
from headrace.tools.sweep.record import State
from headrace.transport.run_dir import RunDir

REFRESH = 0.5
"""Seconds between two pictures."""
PLAIN_INTERVAL = 30.0
"""Seconds between two lines about runs that go on."""
MOST_ROWS = 20
"""Of more runs, only those are shown that run or have failed."""
STYLES = {"running": "cyan", "failed": "red", "finished": "green", "unfinished": "yellow", "waiting": "dim"}


class Progress:
    """One run, read as it grows."""

    def __init__(self, name: str, directory: Path, state: State, max_steps: int | None) -> None:
        self.name, self.state, self.max_steps = name, state, max_steps
        self.history = History()
        self._tail = Tail(RunDir(directory).metrics)

    def read(self) -> None:
        for record in self._tail.read():
            self.history.add(record)

    @property
    def steps(self) -> str:
        return str(self.history.step) if self.max_steps is None else f"{self.history.step}/{self.max_steps}"

    @property
    def value(self) -> str:
        """Its newest reward; of supervised training, the loss."""
        if reward := self.history.train_reward():
            return f"{reward[-1][1]:.3f}"
        loss = self.history.loss()
        return f"loss {loss[-1][1]:.4f}" if loss else ""

    @property
    def time(self) -> str:
        seconds = float(self.history.latest.get("progress/seconds", self.history.elapsed))
        return duration(seconds) if seconds else ""


class View:
    """What is seen of the runs; `say` is for lines that stay."""

    def __init__(self, title: str, runs: Sequence[Progress], console: Console | None = None) -> None:
        self._title, self._runs = title, runs
        self._console = console or Console()
        self._next = 0.0
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = LiveRegion(self._console) if live else None

    def show(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + (REFRESH if self._live is not None else PLAIN_INTERVAL)
        if self._live is not None:
            self._live.draw(table(self._title, self._runs))
        elif running := [run for run in self._runs if run.state == "running" and run.history.step]:
            self.say("; ".join([counts(self._runs), *(f"{run.name} {run.steps} {run.value}" for run in running)]))

    def say(self, message: str) -> None:
        if self._live is not None:
            self._live.say(message)
        else:  # not wrapped: one line of a log file or a pipe stays one line
            self._console.print(Text(message), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.close(table(self._title, self._runs))


def counts(runs: Sequence[Progress]) -> str:
    """`3 of 8 finished, 1 failed`."""
    told = f"{sum(run.state == 'finished' for run in runs)} of {len(runs)} finished"
    failed = sum(run.state == "failed" for run in runs)
    return f"{told}, {failed} failed" if failed else told


def table(title: str, runs: Sequence[Progress]) -> Table:
    shown = runs if len(runs) <= MOST_ROWS else [run for run in runs if run.state in ("running", "failed")]
    found = Table("run", "state", title=Text(f"{title}: {counts(runs)}"), title_justify="left")
    for column in ("step", "reward", "time"):
        found.add_column(column, justify="right")
    for run in shown:
        found.add_row(Text(run.name), Text(run.state, style=STYLES[run.state]), run.steps, run.value, run.time)
    return found
