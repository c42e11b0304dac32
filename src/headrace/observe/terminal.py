"""Terminal view of a run: a compact live view, or plain lines if the output is not a terminal.

Everything comes from `metrics.jsonl` and the status files, so the view does not slow down the run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.observe.console import SafeConsole
from headrace.observe.diagnosis import Finding, Notices
from headrace.observe.metrics import History, Record
from headrace.observe.status import ObservedStatus, activity, duration
from headrace.safe_text import CONTINUATION

Statuses = Mapping[str, ObservedStatus]

SPARKS = "▁▂▃▄▅▆▇█"
REFRESH_S = 0.5
MAX_GAUGES = 4
"""Gauges of a process that are shown beside its activity."""
MIN_GAUGES_WIDTH = 80
"""Terminal width from which on gauges are shown."""
LABEL_WIDTH = len("orchestrator") + 2
BAR_WIDTH = 28
SPARK_WIDTH = 30
PLAIN_INTERVAL_S = 1.0
"""Minimum time between two step lines."""
REPEATED_LINES = 8
"""Permanent lines that are printed again after a resize."""


class LiveRegion:
    """A few lines that are redrawn in place.

    After a resize, terminals have wrapped the old lines in different ways, so they cannot be erased one by one: the
    screen is cleared, and the newest permanent lines are printed again above the region.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._messages: deque[str] = deque(maxlen=REPEATED_LINES)
        self._start()

    def _start(self) -> None:
        self._size = self.console.size
        self._live = Live(console=self.console, auto_refresh=False)
        self._live.start()

    def draw(self, content: RenderableType) -> None:
        if self.console.size != self._size:
            self._live.stop()
            self.console.clear()
            for message in self._messages:
                self.console.print(Text(message))
            self._start()
        self._live.update(content, refresh=True)

    def say(self, message: str) -> None:
        self._messages.append(message.replace("\n", CONTINUATION))
        self.console.print(Text(self._messages[-1]))

    def finish(self, content: RenderableType) -> None:
        self.draw(content)
        self._live.stop()


class LiveView(LiveRegion):
    """A view of the run in a few lines that are redrawn in place."""

    def __init__(self, title: str, max_steps: int, console: Console) -> None:
        super().__init__(console)
        self._title, self._max_steps = title, max_steps
        self._started, self._next = time.monotonic(), 0.0

    def show(self, history: History, statuses: Statuses, findings: Sequence[Finding] = ()) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REFRESH_S
            self.draw(self._render(history, statuses, findings))

    def close(self, history: History, statuses: Statuses) -> None:
        self.finish(self._render(history, statuses, ()))

    def _render(self, history: History, statuses: Statuses, findings: Sequence[Finding]) -> RenderableType:
        elapsed_s = time.monotonic() - self._started
        return render(self._title, self._max_steps, history, statuses, elapsed_s, self.console.width, findings)


class PlainView:
    """Plain lines for log files and pipes: steps (at most one a second), evaluations, and findings."""

    def __init__(self, max_steps: int, console: Console) -> None:
        self._max_steps, self._console = max_steps, console
        self._next = 0.0
        self._step: int | None = None
        self._evals: dict[str, dict[int, float]] = {}
        self._notices = Notices()

    def show(self, history: History, statuses: Statuses, findings: Sequence[Finding] = ()) -> None:
        self._show_evals(history)
        if self._step is None:  # steps before a resume are not shown
            self._step = history.step
        if history.step != self._step and time.monotonic() >= self._next:
            self._show_step(history)
        for finding in self._notices.due(findings, time.monotonic()):
            self.say(str(finding))

    def say(self, message: str) -> None:
        # Not wrapped: a message is one line of the log file.
        self._console.print(Text(message.replace("\n", CONTINUATION)), soft_wrap=True)

    def close(self, history: History, statuses: Statuses) -> None:
        self._show_evals(history)
        if self._step is not None and history.step != self._step:
            self._show_step(history)

    def _show_step(self, history: History) -> None:
        self._step, self._next = history.step, time.monotonic() + PLAIN_INTERVAL_S
        head, left = f"step {history.step}/{self._max_steps}", _left(history, self._max_steps)
        self.say("  ".join([head, *facts(history), *left]))

    def _show_evals(self, history: History) -> None:
        for name, versions in history.evals.items():
            for version in sorted(versions.keys() - self._evals.get(name, {}).keys()):
                if self._step is not None or version >= history.step:
                    share = history.eval_failures[name][version]
                    failed = f" ({share:.0%} of its episodes failed)" if share else ""
                    self.say(f"eval at step {version}: {name} {versions[version]:.3f}{failed}")
        self._evals = {name: dict(versions) for name, versions in history.evals.items()}


View = LiveView | PlainView
"""The output of the launcher. `say` prints permanent lines."""


def make_view(title: str, max_steps: int, console: Console | None = None) -> View:
    """Return the live view on a terminal, plain lines otherwise."""
    console = console or SafeConsole()
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveView(title, max_steps, console) if live else PlainView(max_steps, console)


def render(
    title: str,
    max_steps: int,
    history: History,
    statuses: Statuses,
    elapsed_s: float,
    width: int,
    findings: Sequence[Finding] = (),
) -> RenderableType:
    """Return the live view: progress, findings, reward or loss, throughput, and the activity of each process.

    No line is wider than `width`: numbers and curves are shortened, sentences are wrapped.
    """
    no_step = any(finding.severity == "problem" or finding.kind == "reported" for finding in findings)
    left = [] if no_step else _left(history, max_steps)  # no estimate while no step completes
    clock = ", ".join([f"{duration(elapsed_s)} elapsed", *left])

    body = Table.grid(padding=(0, 2))
    body.add_column(style="dim", overflow="fold", min_width=min(LABEL_WIDTH - 2, width // 2))
    body.add_column(overflow="fold")
    curve_width = min(SPARK_WIDTH, max(1, width - LABEL_WIDTH - len("0.0000  ")))
    for label, value in (*_curves(history, curve_width), *_speeds(history.latest)):
        body.add_row(label, value)
    for name, status in statuses.items():
        line = Text(activity(status))
        if status.state != "finished" and width >= MIN_GAUGES_WIDTH:
            gauges = [(key.rpartition("/")[2].replace("_", " "), value) for key, value in status.gauges.items()]
            line.append("  " + ", ".join(f"{key} {number(value)}" for key, value in gauges[:MAX_GAUGES]), "dim")
        body.add_row(name, line)
    head = _head(title, min(history.step, max_steps), max_steps, clock, width)
    return Group(head, *(Text(str(finding).replace("\n", CONTINUATION), style="yellow") for finding in findings), body)


def _head(title: str, step: int, max_steps: int, clock: str, width: int) -> RenderableType:
    """Return title, steps and time in one line, or in three if that is wider than `width`."""
    steps = f"step {step}/{max_steps}"
    bar = ProgressBar(total=max_steps, completed=step, width=BAR_WIDTH, complete_style="cyan")
    name, time_text = Text(title, style="bold", overflow="fold"), Text(clock, style="dim")
    line = Table.grid(padding=(0, 2))
    if cell_len(title) + len(steps) + BAR_WIDTH + len(clock) + 6 <= width:
        line.add_row(name, steps, bar, time_text)
        return line
    bar.width = min(BAR_WIDTH, width - len(steps) - 2)
    if bar.width < 1:
        return Group(name, steps, time_text)
    line.add_row(steps, bar)
    return Group(name, line, time_text)


def facts(history: History) -> list[str]:
    """Return the numbers of the newest trained step as short phrases. Shipped batches may be ahead of it."""
    step = {**history.steps.get(history.step, {}), **history.trained.get(history.step, {})}
    if held_out := history.held_out():
        step["held-out"] = held_out[-1][1]
    forms = {
        "reward/all/mean": "reward {:.3f}",
        "loss": "loss {:.4f}",
        "dpo/accuracy": "accuracy of pairs {:.3f}",
        "held-out": "held-out {:.3f}",
        "perf/sampled_tokens_per_second": "sampled {:,.0f} tokens/s",
        "perf/trained_tokens_per_second": "trained {:,.0f} tokens/s",
        "off_policy/staleness/mean": "staleness {:.2f}",
    }
    if "loss" in step and step["loss"] is None:  # JSON has no NaN
        step["loss"] = math.nan
    return [form.format(step[key]) for key, form in forms.items() if step.get(key) is not None] + _skipped(step)


def _skipped(record: Record) -> list[str]:
    """Return a phrase about steps without an update, if there were any."""
    count = int(record.get("optim/skipped") or 0)
    return [f"{count:,} update{'s' * (count > 1)} skipped: gradients not finite"] if count else []


def _curves(history: History, width: int) -> list[tuple[str, Text]]:
    """Return rows with sparklines of at most `width` characters."""
    rows = []
    reward, loss = history.train_reward(), history.loss()
    if curve := reward or loss:
        label, decimals = ("train reward", 3) if reward else ("loss", 4)
        line = sparkline([value for _, value in curve], width)
        rows.append((label, Text(f"{curve[-1][1]:.{decimals}f}  ").append(line, style="cyan")))
    rows += [("trouble", Text(words, style="red")) for words in _skipped(history.latest)]
    if held_out := history.held_out():
        text = Text().append(f"{held_out[-1][1]:.3f}  ", style="bold")
        text.append(sparkline([value for _, value in held_out], width), style="yellow")
        text.append(f"  at step {held_out[-1][0]}, {held_out[0][1]:.3f} at first", style="dim")
        rows.append(("held-out", text))
    return rows


def _speeds(latest: Record) -> list[tuple[str, Text]]:
    keys = {label: f"perf/{label}_tokens_per_second" for label in ("sampled", "trained")}
    parts = [f"{number(latest[key])} {label}" for label, key in keys.items() if key in latest]
    rows = [("tokens/s", Text("   ".join(parts)))] if parts else []
    if "off_policy/staleness/mean" in latest:
        rows.append(("staleness", Text(f"{number(latest['off_policy/staleness/mean'])} steps")))
    return rows


def _left(history: History, max_steps: int) -> list[str]:
    """Return the estimated time left at the recent pace, once there are enough steps."""
    times = [float(record["time"]) for record in history.trained.values()][-20:]
    remaining = max_steps - history.step
    if len(times) < 3 or remaining <= 0:
        return []
    # The median, to ignore pauses between two launches.
    pace = statistics.median(later - earlier for earlier, later in pairwise(times))
    return [f"{duration(pace * remaining)} left"]


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """Return a curve as block characters between the smallest and the largest value, averaged to `width`."""
    if not values:
        return ""
    cells = min(width, len(values))
    edges = [index * len(values) // cells for index in range(cells + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[min(len(SPARKS) - 1, int((mean - low) / span * len(SPARKS)))] for mean in means)


def number(value: object) -> str:
    """Return a number in short form (`1.2M`, `9.8k`, `0.91`, `12`); anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.1f}{suffix}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
