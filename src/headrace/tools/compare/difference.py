"""One variant of runs against another: which test their seeds and files allow, and what it does not say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from headrace.tools.compare.significance import Estimate, bootstrap, one_against_several, welch

LAST_STEPS = 20
"""Steps whose values are drawn again where there is nothing better."""
SEEDS = "several seeds of each"


class Side(NamedTuple):
    """A variant: of each of its runs, in numbers."""

    name: str
    ends: Sequence[float]
    """What it came to."""
    steps: Sequence[Sequence[float]]
    """Its values by step, the last one last; of an evaluation nothing."""
    examples: Sequence[Mapping[str, float]]
    """Its scores by held-out example; nothing where there are none."""


class Difference(msgspec.Struct):
    """A variant minus the baseline."""

    metric: str
    baseline: str
    variant: str
    method: str
    """`welch`, `one_against_several`, `bootstrap_of_examples`, `bootstrap_of_steps` or `none`."""
    difference: float
    low: float | None = None
    """Of the 95% interval; None where nothing could be tested."""
    high: float | None = None
    p: float | None = None
    note: str = ""
    """What the test was over, and what it does not say."""


class _Tested(NamedTuple):
    method: str
    estimate: Estimate | None
    note: str


def difference(metric: str, baseline: Side, variant: Side) -> Difference:
    """By the best test there is: over seeds, else over examples, else over steps."""
    if len(baseline.ends) == len(variant.ends) == 1:
        tested = _of_two_runs(baseline, variant)
    else:
        tested = _of_seeds(baseline, variant)
    found = Difference(
        metric, baseline.name, variant.name, tested.method, _mean(variant.ends) - _mean(baseline.ends), note=tested.note
    )
    if tested.estimate is not None:
        # Over more steps, or over examples that both have, the means are others: the interval is around those.
        found.difference, found.low, found.high, found.p = tested.estimate
    return found


def _of_seeds(baseline: Side, variant: Side) -> _Tested:
    first, second = baseline.ends, variant.ends
    counts = f"over {len(first)} and {len(second)} seeds"
    if len(first) > 1 and len(second) > 1:
        method, estimate, note = "welch", welch(first, second), f"Welch's t-test {counts}"
    else:
        alone = baseline if len(first) == 1 else variant
        method, estimate = "one_against_several", _one_against_several(first, second)
        note = f"t-test {counts}; {alone.name} has one, which is taken to vary as the others do"
    if estimate is None:
        return _Tested("none", None, "every seed came to the same value: there is no spread to judge by")
    return _Tested(method, estimate, note)


def _one_against_several(first: Sequence[float], second: Sequence[float]) -> Estimate | None:
    if len(first) == 1:
        return one_against_several(first[0], second)
    estimate = one_against_several(second[0], first)
    return estimate and Estimate(-estimate.difference, -estimate.high, -estimate.low, estimate.p)


def _of_two_runs(baseline: Side, variant: Side) -> _Tested:
    if baseline.examples and variant.examples:
        return _of_examples(baseline.examples[0], variant.examples[0])
    if not (baseline.steps and variant.steps):
        note = f"one evaluation each says nothing of how sure this is; `headrace eval` and --evaluation do, or {SEEDS}"
        return _Tested("none", None, note)
    count = min(LAST_STEPS, len(baseline.steps[0]), len(variant.steps[0]))
    if count < 2:
        return _Tested("none", None, f"one step each says nothing of how sure this is; {SEEDS} would")
    estimate = bootstrap(baseline.steps[0][-count:], variant.steps[0][-count:], paired=False)
    note = (
        f"bootstrap over the last {count} steps of one run each. Steps of a run depend on each other, and another seed "
        f"may come to something else: a hint, no proof; {SEEDS} would be"
    )
    return _Tested("bootstrap_of_steps", estimate, note)


def _of_examples(first: Mapping[str, float], second: Mapping[str, float]) -> _Tested:
    both = [key for key in first if key in second]
    if both:
        told, paired = f"the {len(both)} held-out examples that both were asked", True
        values = [first[key] for key in both], [second[key] for key in both]
    else:
        told, paired = f"{len(first)} and {len(second)} held-out examples, none of them the same", False
        values = list(first.values()), list(second.values())
    note = f"bootstrap over {told}. It is about these two models; what the settings do, {SEEDS} would say"
    return _Tested("bootstrap_of_examples", bootstrap(*values, paired=paired), note)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
