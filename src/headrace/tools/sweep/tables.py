"""The tables of a sweep's report: variants, their differences from the first, what evaluation found, runs."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.observe.summary import duration
from headrace.tools.compare.comparison import RunComparison
from headrace.tools.compare.significance import Difference
from headrace.tools.compare.view import Cells, format_spread, number, signed, significance_limit, verdict
from headrace.tools.sweep.charts import by_variant
from headrace.tools.sweep.names import shown
from headrace.tools.sweep.results import Results, RunResult

MEASURES = ("format", "tokens", "thinking_tokens", "thinking_words", "truncated", "failed")
"""Of an evaluation, beside avg@k and pass@k."""


def variants(comparison: RunComparison, results: Results) -> Cells:
    """What the runs of each came to, and the p of its difference from the first."""
    metrics = list(comparison.variants[0].ends)
    tests = {found.variant: found for found in comparison.differences if found.metric == comparison.metric}
    several = any(len(variant.runs) > 1 for variant in comparison.variants)
    rows = []
    for variant in comparison.variants:
        ends = [variant.ends[metric] for metric in metrics]
        cells = [format_spread(end) if several else number(end.mean) for end in ends]
        found = tests.get(variant.name)
        planned = sum(run.variant == variant.name for run in results.runs)
        rows.append([variant.name, f"{len(variant.runs)} of {planned}", *cells, "" if found is None else _p(found)])
    return [["variant", "runs", *metrics, f"p of {comparison.metric}"], *rows]


def against_first(comparison: RunComparison) -> tuple[Cells, list[str]]:
    """Every difference that was tested, and what the tests are; nothing where there is one variant."""
    if not comparison.differences:
        return [], []
    tested, limit = significance_limit(comparison)
    rows = []
    for found in comparison.differences:
        at = comparison.at.get(found.metric)
        what = found.metric if at is None else f"{found.metric} at step {at}"
        ends = "" if found.low is None or found.high is None else f"{signed(found.low)} to {signed(found.high)}"
        rows.append([found.variant, what, signed(found.difference), ends, _p(found), verdict(found, limit)])
    notes = list(dict.fromkeys(f"{found.note[0].upper()}{found.note[1:]}." for found in comparison.differences))
    if tested > 1:
        notes.append(f"{tested} differences were tested, so that a p below {limit:.2g} is asked of each.")
    return [["variant", "metric", "difference", "95%", "p", ""], *rows], notes


def _p(found: Difference) -> str:
    return "" if found.p is None else f"{found.p:.2g}"


def evaluation(results: Results) -> Cells:
    """By variant, the means over its runs."""
    known = [run for run in results.runs if run.evaluation]
    if not known:
        return []
    rates = dict.fromkeys(name for run in known for name in run.evaluation if "@" in name)
    measures = [*rates, *(name for name in MEASURES if any(name in run.evaluation for run in known))]
    means = {name: by_variant(known, lambda run, name=name: run.evaluation.get(name)) for name in measures}  # type: ignore[misc]
    names = dict.fromkeys(run.variant for run in known)
    rows = []
    for variant in names:
        models = sum(run.variant == variant for run in known)
        cells = [_length(name, means[name][variant].value) if variant in means[name] else "" for name in measures]
        rows.append([variant, str(models), *cells])
    return [["variant", "models", *measures], *rows]


def _length(name: str, value: float) -> str:
    return f"{value:.1f}" if name == "tokens" or "thinking" in name else f"{value:.3f}"


def settings(runs: Sequence[RunResult]) -> Cells:
    """What each variant sets, where its name does not say so."""
    keys = list(dict.fromkeys(key for run in runs for key in run.values))
    values = {run.variant: run.values for run in runs}
    if all("=" in variant or not set_here for variant, set_here in values.items()):
        return []
    rows = [[name, *(shown(found[key]) if key in found else "" for key in keys)] for name, found in values.items()]
    return [["variant", *keys], *rows]


def by_run(results: Results) -> Cells:
    metrics = list(results.curves)
    rows = [
        [
            run.name,
            run.state,
            str(run.steps) if run.max_steps in (None, run.steps) else f"{run.steps} of {run.max_steps}",
            *(number(run.ends[metric]) if metric in run.ends else "" for metric in metrics),
            duration(run.seconds),
        ]
        for run in results.runs
    ]
    return [["run", "state", "steps", *metrics, "time"], *rows]
