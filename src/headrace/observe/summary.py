"""Summary of a run: a few numbers for the terminal and for scripts, `summary.md` and the reward chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import BadInput
from headrace.observe.chart import reward_chart
from headrace.observe.environments import EnvironmentReport, dropped_text, ends, failures, report_environments, table
from headrace.observe.metrics import History, Tail
from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RunDir


class Summary(msgspec.Struct):
    """The numbers of `headrace summary --json`. None: not reported by the run."""

    steps: int
    reward_start: float | None
    reward_end: float | None
    reward_from: str
    """`held-out` (first and last evaluation), `train` (mean of the first and last five steps, or of the halves of a
    short run) or `none`."""
    loss_end: float | None
    seconds: float
    rollouts: int
    tokens_sampled: int
    tokens_trained: int
    dropped: dict[str, int]
    skipped: int = 0
    """Steps without an update, since their gradient was not finite."""
    environments: list[EnvironmentReport] = msgspec.field(default_factory=list)


class NoRun(BadInput):
    """The directory has no metrics."""


def read_history(run: RunDir) -> History:
    """Return everything that the run has recorded so far."""
    if not run.metrics.is_file():
        raise NoRun(f"it has no {run.metrics.name}: not a run, or one without metrics yet", value=run.root)
    return History(Tail(run.metrics).read())


def summarize(run: RunDir) -> Summary:
    return summary_of(run, read_history(run))


def summary_of(run: RunDir, history: History) -> Summary:
    latest, loss = history.latest, history.loss()
    start = end = None
    source = "none"
    if held_out := history.held_out():
        start, end, source = held_out[0][1], held_out[-1][1], "held-out"
    elif train := history.train_reward():
        (start, end), source = ends(train), "train"
    prefix = "progress/dropped/"
    return Summary(
        steps=history.step,
        reward_start=start,
        reward_end=end,
        reward_from=source,
        loss_end=loss[-1][1] if loss else None,
        seconds=float(latest.get("progress/seconds", history.elapsed)),
        rollouts=int(latest.get("progress/rollouts", 0)),
        tokens_sampled=int(latest.get("progress/tokens_sampled", 0)),
        tokens_trained=int(latest.get("progress/tokens_trained", 0)),
        dropped={key.removeprefix(prefix): int(n) for key, n in latest.items() if key.startswith(prefix) and n},
        skipped=int(latest.get("optim/skipped") or 0),
        environments=report_environments(run, history),
    )


def write_summary(run: RunDir, history: History | None = None) -> Summary:
    """Write `summary.md`, and `reward.svg` if there are rewards, into the run directory."""
    history = read_history(run) if history is None else history
    summary = summary_of(run, history)
    if summary.reward_end is not None:
        chart = reward_chart(f"{title(run)}: reward", history.train_reward(), history.held_out())
        write_atomically(run.plot, chart.encode())
    write_atomically(run.summary, page(run, summary).encode())
    return summary


def title(run: RunDir) -> str:
    return run.root.resolve().name


def rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the summary as labels and values."""
    result = [("steps", f"{summary.steps} in {duration(summary.seconds)}")]
    if summary.skipped:
        result.append(("skipped", f"{summary.skipped} of these had no update: their gradient was not finite"))
    if summary.reward_start is not None and summary.reward_end is not None:
        gain = summary.reward_end - summary.reward_start
        value = f"{summary.reward_start:.3f} → {summary.reward_end:.3f} ({gain:+.3f})"
        result.append((f"{summary.reward_from} reward", value))
    elif summary.loss_end is not None:
        result.append(("loss at the end", f"{summary.loss_end:.4f}"))
    if summary.rollouts:
        result.append(("rollouts", f"{summary.rollouts:,}"))
    if summary.dropped:
        result.append(("not trained on", dropped_text(summary.dropped)))
    if summary.tokens_sampled:
        result.append(("tokens sampled", f"{summary.tokens_sampled:,}"))
    if summary.tokens_trained:
        result.append(("tokens trained", f"{summary.tokens_trained:,}"))
    return result


def places(run: RunDir) -> list[tuple[str, Path]]:
    """Return the files of the run directory that exist, with labels."""
    candidates = [
        ("model", run.final_model),
        ("plot", run.plot),
        ("summary", run.summary),
        ("rollouts", run.rollouts),
        ("checkpoints", run.checkpoints),
        ("metrics", run.metrics),
        ("logs", run.logs),
        ("config", run.config),
    ]
    return [(label, path) for label, path in candidates if path.exists()]


def text(run: RunDir, summary: Summary) -> str:
    """Return the summary as a table for the terminal, with the paths of the chart and the model."""
    shown = [*rows(summary), *((label, str(path)) for label, path in places(run) if label in ("model", "plot"))]
    width = max(len(label) for label, _ in shown)
    lines = [title(run), *(f"  {label:<{width}}  {value}" for label, value in shown)]
    if len(summary.environments) > 1:
        cells = table(summary.environments)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)]
    return "\n".join(lines + [f"  {sentence}" for sentence in failures(summary.environments)])


def page(run: RunDir, summary: Summary) -> str:
    """Return the content of `summary.md`."""
    where = [(label, path.relative_to(run.root)) for label, path in places(run) if path != run.summary]
    lines = [
        f"# {title(run)}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label} | {value} |" for label, value in rows(summary)),
        "",
        *_environments(summary),
        *([f"![Reward over optimizer steps]({run.plot.name})", ""] if run.plot.exists() else []),
        "## Where things are",
        "",
        *(f"- {label}: [`{path}`]({path})" for label, path in where),
    ]
    if settings := _settings(run):
        lines += ["", "## Configuration", "", *(f"- `{key}` = `{value}`" for key, value in settings)]
    lines += ["", f"The same numbers as JSON: `headrace summary {run.root} --json`", ""]
    return "\n".join(lines)


def _environments(summary: Summary) -> list[str]:
    """Return the part of `summary.md` about environments, if there are several or one has failures."""
    entries = summary.environments
    if len(entries) < 2 and not failures(entries):
        return []
    titles, *cells = table(entries)
    lines = [titles, ["---"] * len(titles), *cells]
    return [
        "## By environment",
        "",
        *(f"| {' | '.join(row)} |" for row in lines),
        "",
        *(f"- {' '.join(sentence.split())}" for sentence in failures(entries)),
        *([""] if failures(entries) else []),
    ]


def _settings(run: RunDir) -> list[tuple[str, Any]]:
    """Return the few keys of the saved configuration that identify the run."""
    from headrace.config.files import read_toml

    if not run.config.is_file():
        return []
    tree = read_toml(run.config)
    environments = tree.get("orchestrator", {}).get("train", {}).get("env", [])
    optim = tree.get("trainer", tree).get("optim", {})
    found = {
        "model.name": tree.get("model", {}).get("name"),
        "orchestrator.train.env": ", ".join(env["name"] for env in environments) or None,
        "trainer.optim.lr" if "trainer" in tree else "optim.lr": optim.get("lr"),
        "max_steps": tree.get("max_steps"),
        "seed": tree.get("seed"),
    }
    return [(key, value) for key, value in found.items() if value is not None]


def duration(seconds: float) -> str:
    """Return seconds as `45 s`, `3:07` or `2:03:07`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
