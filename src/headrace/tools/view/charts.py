"""The charts that a run's page shows, and where the time of each process went."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from headrace.errors import BadInput
from headrace.observe.histograms import BOUNDS, PREFIX, decode
from headrace.tools.view.series import MetricsTable, downsample, numbers

CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "", ("reward/*/mean",)),
    ("Evaluation", "", ("eval/*/avg@*",)),
    ("Loss", "", ("loss", "loss/*", "val/loss")),
    ("Length", "tokens", ("decode_len/*/mean", "decode_len/all/max")),
    ("Dropped rollouts by reason", "rollouts", ("dropped/*",)),
    ("Staleness", "versions", ("off_policy/staleness/mean", "off_policy/staleness/max")),
    ("Entropy", "nats", ("entropy", "entropy/*")),
    ("Drift between engine and trainer", "", ("drift/decode", "drift/prefill", "mismatch_kl", "is_masked")),
    ("KL to the reference", "nats", ("kl/*", "ref_kl")),
    ("Advantages", "", ("advantages/p5", "advantages/p50", "advantages/p95")),
    ("Throughput", "tokens/s", ("perf/sampled_tokens_per_second", "perf/trained_tokens_per_second")),
    ("Engine slots in use", "share", ("perf/slots_used",)),
    ("Gradient norm", "", ("optim/grad_norm",)),
    ("Solved groups", "share", ("solve_all", "solve_none")),
    ("Ends of episodes", "share", ("stop_condition/*",)),
)
"""Title, unit, and patterns of the metrics of each chart."""
MAX_LINES = 12
"""Of one chart."""
MAX_BUCKETS = 2000
REWARDS = ("reward/all/mean", "loss")
"""The metric of the sparkline: the first that a run has."""

LANES = {
    "trainer": ("time/step", {
        "wait_for_batch": "wait", "wait_for_turn": "wait", "forward_backward": "work", "render": "work",
        "probe": "work", "publish": "work", "token_export": "work", "save_ckpt": "work", "validate": "work",
    }),
    "orchestrator": ("time/batch", {
        "wait_for_rollouts": "wait", "wait_for_weights": "wait", "scoring": "work", "write_batch": "work",
    }),
}  # fmt: skip
"""By process: the metric of its whole time per step, and those of its parts, with whether it waits or works in them."""
LANE_METRICS = [total for total, _ in LANES.values()] + ["perf/slots_used"]
LANE_METRICS += [f"time/{part}" for _, parts in LANES.values() for part in parts]


def suggest_charts(names: list[str]) -> list[dict[str, Any]]:
    """Return the charts that have any metric. A single environment has no lines beside those of all environments."""
    environments = {name[len("reward/") : -len("/mean")] for name in names if fnmatchcase(name, "reward/*/mean")}
    if len(environments - {"all"}) == 1:
        (own,) = (f"/{env}" for env in environments - {"all"})
        of_all = {name.replace(own, end, 1): name for name in names if own in name for end in ("/all", "")}
        names = [name for name in names if name not in {of_all[other] for other in of_all.keys() & set(names)}]
    charts = []
    for title, unit, patterns in CHARTS:
        matching = [name for pattern in patterns for name in names if fnmatchcase(name, pattern)]
        chosen = list(dict.fromkeys(matching))[:MAX_LINES]
        if chosen:
            charts.append({"title": title, "unit": unit, "names": chosen, "log": False})
    return charts


def charted(metrics: MetricsTable) -> list[str]:
    """Return the names of the metrics of all charts."""
    return list(dict.fromkeys(name for chart in suggest_charts(metrics.names()) for name in chart["names"]))


def read_page(metrics: MetricsTable) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return all metrics of a run's page, from one pass over the file: each takes a third of a second in a long run."""
    totals = [name for name in metrics.names() if name.startswith("progress/")]
    histograms = [PREFIX + name for name in BOUNDS]
    return metrics.points([*charted(metrics), *totals, *LANE_METRICS, *histograms, *REWARDS, "time"])


def read_series(metrics: MetricsTable, buckets: int, first: int = 0, last: int | None = None) -> dict[str, Any]:
    """Return the metrics of all charts between two steps, merged into at most `buckets` ranges."""
    page = read_page(metrics)
    points = {name: page[name] for name in charted(metrics) if name in page}
    end = max((int(steps[-1]) for steps, _ in points.values() if len(steps)), default=0)
    series = {}
    for name, (steps, values) in points.items():
        inside = (steps >= first) & (steps <= (end if last is None else last))
        series[name] = downsample(steps[inside], values[inside], check_buckets(buckets))
    return {"series": series, "first": first, "last": end if last is None else last}


def check_buckets(buckets: int) -> int:
    if not 1 <= buckets <= MAX_BUCKETS:
        raise BadInput(f"not between 1 and {MAX_BUCKETS}", key="buckets", value=buckets)
    return buckets


def read_histograms(metrics: MetricsTable, buckets: int, first: int = 0, last: int | None = None) -> dict[str, Any]:
    """Return the recorded histograms between two steps, added up over at most `buckets` ranges of steps."""
    points = metrics.points(PREFIX + name for name in BOUNDS)
    histograms = []
    for name, bounds in BOUNDS.items():
        steps, texts = points[PREFIX + name]
        inside = (steps >= first) & (steps <= (np.inf if last is None else last))
        steps, texts = steps[inside], texts[inside]
        if not len(steps):
            continue
        starts = np.arange(0, len(steps), -(-len(steps) // check_buckets(buckets)))
        try:
            counts = np.add.reduceat(np.stack([decode(name, text).counts for text in texts]), starts)
        except ValueError as error:
            raise BadInput(f"damaged: {error}", file=metrics.path, key=PREFIX + name) from error
        histograms.append({"name": name, "bounds": bounds, "step": steps[starts].tolist(), "counts": counts.tolist()})
    return {"histograms": histograms}


def read_lanes(metrics: MetricsTable, buckets: int, first: int = 0, last: int | None = None) -> dict[str, Any]:
    """Return the seconds per step that each process spent on each activity, as means over ranges of steps."""
    points = metrics.points(LANE_METRICS)
    steps = np.unique(np.concatenate([points[total][0] for total, _ in LANES.values()]))
    steps = steps[(steps >= first) & (steps <= (np.inf if last is None else last))]
    per_bucket = max(1, -(-len(steps) // check_buckets(buckets)))

    def mean(name: str) -> np.ndarray:
        """Return the mean of a metric over each bucket; 0 where it was not recorded."""
        values = np.zeros(len(steps))
        place = np.searchsorted(steps, points[name][0])
        valid = (place < len(steps)) & np.isin(points[name][0], steps)
        values[place[valid]] = points[name][1][valid]
        starts = np.arange(0, len(steps), per_bucket)
        return np.add.reduceat(values, starts) / np.diff([*starts, len(steps)]) if len(steps) else values

    lanes = []
    for process, (total_name, parts) in LANES.items():
        if not len(points[total_name][0]):
            continue
        total = mean(total_name)
        means = {part: (kind, mean(f"time/{part}")) for part, kind in parts.items() if len(points[f"time/{part}"][0])}
        rest = np.maximum(0.0, total - sum(seconds for _, seconds in means.values()))
        entries = [{"name": part, "kind": kind, "seconds": numbers(s)} for part, (kind, s) in means.items()]
        entries.append({"name": "other", "kind": "other", "seconds": numbers(rest)})
        lanes.append({"process": process, "parts": entries, "total": numbers(total)})
    if len(points["perf/slots_used"][0]):
        batch, used = mean("time/batch"), mean("perf/slots_used")
        sampling = [{"name": "slots in use", "kind": "work", "seconds": numbers(batch * used)}]
        sampling.append({"name": "slots idle", "kind": "wait", "seconds": numbers(batch * np.maximum(0.0, 1 - used))})
        lanes.append({"process": "inference", "parts": sampling, "total": numbers(batch)})
    return {"step": steps[::per_bucket].tolist(), "steps_per_bucket": per_bucket, "lanes": lanes}
