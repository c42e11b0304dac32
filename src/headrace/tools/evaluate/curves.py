"""Learning curves: what the checkpoints of runs came to over their steps. A run with one checkpoint has none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.tools.evaluate.charts import curve_chart
from headrace.tools.evaluate.estimates import Estimate
from headrace.tools.evaluate.results import Result, score_of
from headrace.tools.names import short_names

Curves = dict[str, list[tuple[int, Estimate]]]
MEASURES = {
    "thinking": {"thinking_tokens": "tokens of thinking, mean", "thinking_words": "words of thinking, mean"},
    "format": {"format": "share of replies in format"},
}
"""Beside accuracy, by the name of the picture: the measures that it may be of, and what they are called there."""


def curves_of(title: str, results: Sequence[Result]) -> dict[str, str]:
    """Pictures by name: `accuracy` (or `reward`), `thinking` and `format`, as far as two steps of a run have them."""
    score = score_of([result.estimates for result in results], results[0].samples)
    scores = _curves([(result, result.estimates[score.measure]) for result in results])
    pictures = {score.name.split()[-1]: curve_chart(title, score.name, scores)} if scores else {}
    for name, measures in MEASURES.items():
        for measure, what in measures.items():
            found = [(result, result.estimates[measure]) for result in results if measure in result.estimates]
            if curves := _curves(found):
                pictures[name] = curve_chart(title, what, curves)
                break
    return pictures


def _curves(found: Sequence[tuple[Result, Estimate]]) -> Curves:
    """By run, under names that tell them apart."""
    by_run: Curves = {}
    for result, estimate in found:
        if result.run and result.step is not None:
            by_run.setdefault(str(Path(result.run).absolute()), []).append((result.step, estimate))
    runs = [run for run, points in by_run.items() if len(points) > 1]
    return {name: sorted(by_run[run], key=_step) for name, run in zip(short_names(runs), runs, strict=True)}


def _step(point: tuple[int, Estimate]) -> int:
    return point[0]
