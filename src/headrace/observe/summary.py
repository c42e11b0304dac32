"""Summary of a run: a few numbers for the terminal and for scripts, `summary.md` and the reward chart.

Counts by environment come from the journal, rewards and scores from the metrics, and error messages from the newest
rollout files. What a run does not have is left out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import BadInput
from headrace.observe.chart import reward_chart
from headrace.observe.metrics import Curve, History, read_metrics
from headrace.observe.run_state import read_heartbeat
from headrace.observe.status import duration
from headrace.safe_text import CONTINUATION, escape_line, escape_markdown, markdown_table
from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RolloutKind, RunDir

log = logging.getLogger(__name__)

END_STEPS = 5
"""Train steps averaged at either end of a curve."""
LOW_SLOT_USE = 0.5
"""Share of the engines' slots in use below which the summary says what would use more."""
MAX_ERROR_FILES = 20
"""Newest rollout files that are searched for errors."""
REASON_TEXTS = {"max_steps": "left over at the end"}
"""Texts of reasons that read like errors and are none; docs/reference/metrics.md lists all reasons."""


class EnvironmentReport(msgspec.Struct):
    """An entry of `environments` in `headrace summary --json`. None: not available."""

    name: str
    algorithm: str | None = None
    """None: only evaluated."""
    draws: int = 0
    rollouts_trained: int = 0
    dropped: dict[str, int] = msgspec.field(default_factory=dict)
    """Rollouts by reason."""
    error: str | None = None
    """Most common error of the newest steps."""
    reward_start: float | None = None
    reward_end: float | None = None
    eval_start: float | None = None
    """avg@k of the first evaluation, and below of the last."""
    eval_end: float | None = None
    eval_failed: float = 0.0
    """Share of episodes of the last evaluation that failed; its mean is over the others."""
    eval_error: str | None = None
    """Most common error of them."""
    errors: dict[str, str] = msgspec.field(default_factory=dict)
    """Most common message of each error reason in the newest steps."""


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
    failure: str | None = None
    """Why the run failed, if it did not end in order or continue since."""
    slots_used: float | None = None
    """Share of the engines' slots that had an episode in flight, mean of the last five steps."""
    slots_advice: str | None = None
    """The setting to change, if less than half of them was used because of it."""


class NoRun(BadInput):
    """The directory has no metrics."""


def read_history(run: RunDir) -> History:
    """Return everything that the run has recorded so far."""
    if not run.metrics.is_file():
        raise NoRun(f"it has no {run.metrics.name}: not a run, or one without metrics yet", value=run.root)
    return History(read_metrics(run.metrics))


def summarize(run: RunDir, history: History | None = None) -> Summary:
    """Return the summary of a run, of `history` if it has been read already."""
    history = read_history(run) if history is None else history
    latest, loss = history.latest, history.loss()
    start = end = None
    source = "none"
    if held_out := history.held_out():
        start, end, source = held_out[0][1], held_out[-1][1], "held-out"
    elif train := history.train_reward():
        (start, end), source = end_means(train), "train"
    prefix, heartbeat = "progress/dropped/", read_heartbeat(run.heartbeat)
    shares = [share for _, share in history.slots_used()]
    used = sum(shares[-END_STEPS:]) / len(shares[-END_STEPS:]) if shares else None
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
        failure=heartbeat.problem or None if heartbeat is not None and heartbeat.state == "failed" else None,
        slots_used=used,
        slots_advice=None if used is None or used >= LOW_SLOT_USE else _slots_advice(_saved_config(run)),
    )


def _slots_advice(config: _SavedConfig) -> str | None:
    """Return the setting that keeps episodes from using the engines' slots; None if it is the size of the batches."""
    if config.orchestrator.max_async_level == 0:
        return "orchestrator.max_async_level = 1 samples the next batch while the longest episodes of one end"
    if config.orchestrator.max_inflight_rollouts != "auto":
        return 'raise orchestrator.max_inflight_rollouts, or set it to "auto"'
    return None


def report_environments(run: RunDir, history: History) -> list[EnvironmentReport]:
    """Return a report per environment: trained ones first, in the order of the run file."""
    section = _saved_config(run).orchestrator
    algorithms = {env.name: (env.algo or section.algo).type for env in section.train.env}
    drawn: dict[str, int] = {}
    dropped: dict[str, dict[str, int]] = {}
    if run.journal.is_file():
        from headrace.transport.journal import Journal

        with closing(Journal(run.journal, read_only=True)) as journal:
            drawn, dropped = journal.drawn_per_env(), journal.drops_per_env()
    errors = _errors(run, RolloutKind.TRAIN, list(RolloutKind.TRAIN.files(run.rollouts))[-MAX_ERROR_FILES:])
    reports = []
    for name in dict.fromkeys([*algorithms, *drawn, *sorted(history.eval_failures)]):
        report = EnvironmentReport(name, algorithms.get(name), drawn.get(name, 0))
        trained = (float(record.get(f"rollouts/{name}") or 0) for record in history.steps.values())
        report.rollouts_trained = int(sum(trained))
        report.dropped, report.errors = dropped.get(name, {}), errors.get(name, {})
        report.error = _first_error(report.errors)
        if curve := history.train_reward(name):
            report.reward_start, report.reward_end = end_means(curve)
        if scores := sorted(history.evals.get(name, {}).items()):
            report.eval_start, report.eval_end = scores[0][1], scores[-1][1]
        if shares := history.eval_failures.get(name):
            report.eval_failed = shares[max(shares)]
            if report.eval_failed and max(shares) in RolloutKind.EVAL.files(run.rollouts):
                report.eval_error = _first_error(_errors(run, RolloutKind.EVAL, [max(shares)]).get(name, {}))
        reports.append(report)
    return reports


def end_means(curve: Curve) -> tuple[float, float]:
    """Return the means of a few steps at the beginning and at the end of a curve; no step counts twice."""
    count = max(1, min(END_STEPS, len(curve) // 2))
    first, last = ([value for _, value in points] for points in (curve[:count], curve[-count:]))
    return sum(first) / count, sum(last) / count


class _Algorithm(msgspec.Struct):
    type: str = "grpo"


class _TrainEnvironment(msgspec.Struct):
    name: str
    algo: _Algorithm | None = None


class _Train(msgspec.Struct):
    env: list[_TrainEnvironment] = []


class _Orchestrator(msgspec.Struct):
    algo: _Algorithm = msgspec.field(default_factory=_Algorithm)
    train: _Train = msgspec.field(default_factory=_Train)
    max_async_level: int = 1
    max_inflight_rollouts: int | str = "auto"


class _Model(msgspec.Struct):
    name: str | None = None


class _Optimizer(msgspec.Struct):
    lr: float | None = None


class _Trainer(msgspec.Struct):
    optim: _Optimizer = msgspec.field(default_factory=_Optimizer)


class _SavedConfig(msgspec.Struct):
    """The keys of a run's configuration that the summary reads. Not the types of run files, which import slowly."""

    orchestrator: _Orchestrator = msgspec.field(default_factory=_Orchestrator)
    model: _Model = msgspec.field(default_factory=_Model)
    trainer: _Trainer | None = None
    optim: _Optimizer = msgspec.field(default_factory=_Optimizer)
    """Of an SFT run, which has no section `trainer`."""
    max_steps: int | None = None
    seed: int | None = None


def _saved_config(run: RunDir) -> _SavedConfig:
    from headrace.config.files import read_toml

    try:
        return msgspec.convert(read_toml(run.config) if run.config.is_file() else {}, _SavedConfig)
    except msgspec.ValidationError as error:
        raise BadInput(f"not the configuration of a run: {error}", file=run.config) from error


def _first_error(errors: dict[str, str]) -> str | None:
    return next((f"{reason}: {message}" for reason, message in errors.items()), None)


def _errors(run: RunDir, kind: RolloutKind, steps: Sequence[int]) -> dict[str, dict[str, str]]:
    """Return by environment the most common message of each error reason in these steps, most common first."""
    from headrace.transport.rollout_files import RolloutFiles

    counts: dict[str, Counter[tuple[str, str]]] = {}
    for step in steps:
        try:
            rows = RolloutFiles(run.rollouts, kind).columns(step, ["env", "error_reason", "error"])
        except BadInput as error:
            log.warning("the errors of a step are left out: %s", error)
            continue
        for row in rows:
            if row.get("error"):  # cancelled episodes have no message
                counts.setdefault(row["env"], Counter())[row["error_reason"], row["error"]] += 1
    messages: dict[str, dict[str, str]] = {env: {} for env in counts}
    for env, errors in counts.items():
        for (reason, message), _ in sorted(errors.items(), key=lambda item: (-item[1], *item[0])):
            messages[env].setdefault(reason, message)
    return messages


def write_summary(run: RunDir, history: History | None = None) -> Summary:
    """Write `summary.md`, and `reward.svg` if there are rewards, into the run directory."""
    history = read_history(run) if history is None else history
    summary = summarize(run, history)
    if summary.reward_end is not None:
        chart = reward_chart(f"{run_title(run)}: reward", history.train_reward(), history.held_out())
        write_atomically(run.plot, chart.encode())
    write_atomically(run.summary, format_page(run, summary).encode())
    return summary


def run_title(run: RunDir) -> str:
    return escape_line(run.root.resolve().name)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the summary as labels and values."""
    result = [("steps", f"{summary.steps} in {duration(summary.seconds)}")]
    if summary.failure is not None:
        result.append(("failed", summary.failure))
    if summary.skipped:
        result.append(("skipped", f"{summary.skipped} of these had no update: their gradient was not finite"))
    if summary.reward_start is not None and summary.reward_end is not None:
        gain = summary.reward_end - summary.reward_start
        value = f"{summary.reward_start:.3f} → {summary.reward_end:.3f} ({gain:+.3f})"
        result.append((f"{summary.reward_from} reward", value))
    elif summary.loss_end is not None:
        result.append(("loss at the end", f"{summary.loss_end:.4f}"))
    counts = {
        "rollouts": f"{summary.rollouts:,}",
        "not trained on": format_drops(summary.dropped),
        "tokens sampled": f"{summary.tokens_sampled:,}",
        "tokens trained": f"{summary.tokens_trained:,}",
    }
    result += [(label, value) for label, value in counts.items() if value not in ("", "0")]
    if summary.slots_used is not None and summary.slots_advice:
        result.append(("engine slots", f"{summary.slots_used:.0%} in use; {summary.slots_advice}"))
    return result


def existing_files(run: RunDir) -> list[tuple[str, Path]]:
    """Return the files of the run directory that exist, with labels."""
    names = ("plot", "summary", "rollouts", "checkpoints", "metrics", "logs", "config")
    paths = [("model", run.final_model), *((name, getattr(run, name)) for name in names)]
    return [(label, path) for label, path in paths if path.exists()]


def format_drops(dropped: Mapping[str, int]) -> str:
    """Return rollouts that were not trained on, by reason: `24 left over at the end, 3 timeout`."""
    return ", ".join(f"{count:,} {REASON_TEXTS.get(reason, reason)}" for reason, count in sorted(dropped.items()))


def format_summary(run: RunDir, summary: Summary) -> str:
    """Return the summary as a table for the terminal, with the paths of the chart and the model."""
    paths = [(label, str(path)) for label, path in existing_files(run) if label in ("model", "plot")]
    shown = [*summary_rows(summary), *paths]
    width = max(len(label) for label, _ in shown)
    lines = [run_title(run), *(f"  {label:<{width}}  {value}" for label, value in shown)]
    if len(summary.environments) > 1:
        cells = environment_table(summary.environments)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", *("  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)]
    lines += [f"  {sentence}" for sentence in describe_failures(summary.environments)]
    return "\n".join(line.replace("\n", CONTINUATION) for line in lines)


def format_page(run: RunDir, summary: Summary) -> str:
    """Return the content of `summary.md`."""
    where = [(label, path.relative_to(run.root)) for label, path in existing_files(run) if path != run.summary]
    lines = [
        f"# {escape_markdown(run_title(run))}",
        "",
        *markdown_table([("", ""), *summary_rows(summary)]),
        "",
        *_environments(summary.environments),
        *([f"![Reward over optimizer steps]({run.plot.name})", ""] if run.plot.exists() else []),
        "## Where things are",
        "",
        *(f"- {label}: [`{path}`]({path})" for label, path in where),
    ]
    if settings := _settings(run):
        lines += ["", "## Configuration", "", *(f"- `{key}` = `{escape_line(str(value))}`" for key, value in settings)]
    lines += ["", f"The same numbers as JSON: `headrace summary {escape_line(str(run.root))} --json`", ""]
    return "\n".join(lines)


def _environments(entries: Sequence[EnvironmentReport]) -> list[str]:
    """Return the part of `summary.md` about environments, if there are several or one has failures."""
    sentences = describe_failures(entries)
    if len(entries) < 2 and not sentences:
        return []
    listed = [f"- {escape_markdown(' '.join(sentence.split()))}" for sentence in sentences]
    table = markdown_table(environment_table(entries))
    return ["## By environment", "", *table, "", *listed, *([""] if listed else [])]


def environment_table(entries: Sequence[EnvironmentReport]) -> list[list[str]]:
    """Return the cells of a table: a row of titles, then a row per environment."""

    def change(start: float | None, end: float | None) -> str:
        return "" if start is None or end is None else f"{start:.3f} → {end:.3f}"

    rows = [["environment", "algorithm", "draws", "trained", "reward", "held-out", "not trained on"]]
    for entry in entries:
        trains = entry.algorithm is not None or entry.draws > 0
        counts = [f"{entry.draws:,}", f"{entry.rollouts_trained:,}"] if trains else ["", ""]
        changes = [change(entry.reward_start, entry.reward_end), change(entry.eval_start, entry.eval_end)]
        cells = [entry.name, entry.algorithm or "", *counts, *changes, format_drops(entry.dropped)]
        rows.append([cell or "-" for cell in cells])
    return rows


def describe_failures(entries: Sequence[EnvironmentReport]) -> list[str]:
    """Return a sentence for every environment with failed episodes, the worst first, and for each further reason."""
    failed = sorted((entry for entry in entries if entry.error), key=lambda entry: entry.rollouts_trained > 0)
    sentences = []
    for entry in failed:
        subject = "some episodes" if entry.rollouts_trained else "nothing was trained on, its episodes"
        sentences.append(f"{entry.name}: {subject} failed, most often with {entry.error}")
        errors = [f"{reason}: {message}" for reason, message in entry.errors.items()]
        sentences += [f"{entry.name}: others failed with {error}" for error in errors if error != entry.error]
    return sentences + [
        f"{entry.name}: {entry.eval_failed:.0%} of the episodes of its last evaluation failed, and are left out of "
        f"its mean: {entry.eval_error or 'the errors are in logs/orchestrator.log'}"
        for entry in entries
        if entry.eval_failed
    ]


def _settings(run: RunDir) -> list[tuple[str, Any]]:
    """Return the few keys of the saved configuration that identify the run."""
    saved = _saved_config(run)
    settings = {
        "model.name": saved.model.name,
        "orchestrator.train.env": ", ".join(env.name for env in saved.orchestrator.train.env) or None,
        "optim.lr" if saved.trainer is None else "trainer.optim.lr": (saved.trainer or saved).optim.lr,
        "max_steps": saved.max_steps,
        "seed": saved.seed,
    }
    return [(key, value) for key, value in settings.items() if value is not None]
