"""`/metrics` of the launcher: the progress of the run, and which of its processes run, wait and were restarted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headrace.observe.exposition import head, sample
from headrace.observe.metrics import History
from headrace.observe.status import ObservedStatus


def launcher_lines(
    history: History, statuses: Mapping[str, ObservedStatus], running: Mapping[str, bool], restarts: Mapping[str, int]
) -> Iterator[str]:
    """Return the samples; `running` and `restarts` are by process and by unit."""
    yield from head("headrace_run_step", "gauge", "Optimizer steps done.")
    yield sample("headrace_run_step", history.step)
    if "time" in history.latest:
        name = "headrace_run_last_record_timestamp_seconds"
        yield from head(name, "gauge", "When a metric was last recorded.")
        yield sample(name, history.latest["time"])
    waiting = {name: status.age(status.waiting_since) for name, status in statuses.items() if status.waiting_for}
    for name, kind, help_text, label, values in (
        ("process_running", "gauge", "1 while a process of the run runs.", "process", running),
        ("process_restarts_total", "counter", "Restarts after crashes and lost hosts.", "unit", restarts),
        ("process_waiting_seconds", "gauge", "For how long processes have been waiting.", "process",
         {name: waiting.get(name, 0.0) for name in statuses}),
        ("process_silent_seconds", "gauge", "Seconds since a process last wrote its status.", "process",
         {name: status.silent_s for name, status in statuses.items()}),
        ("process_problem", "gauge", "1 while a process reports a problem.", "process",
         {name: bool(status.problem) for name, status in statuses.items()}),
    ):  # fmt: skip
        yield from head(f"headrace_{name}", kind, help_text)
        for process, value in sorted(values.items()):
            yield sample(f"headrace_{name}", float(value), {label: process})
