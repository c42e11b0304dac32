"""From episodes to a model's numbers: means over examples with intervals, and failures by reason. Pure functions.

Each number is the mean over examples of the mean over an example's samples. A failed episode is left out of all of them
and counted as `failed`, as in the evaluations of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import msgspec

from headrace.errors import BadInput
from headrace.orchestrator.batch_metrics import MAX_FAILED_SHARE
from headrace.rollout.pass_at_k import pass_rates
from headrace.tools.evaluate.completions import Correctness, Scored
from headrace.tools.evaluate.estimates import Estimate, Spread, estimate, spread_of

LENGTH_OF: dict[str, Callable[[Scored], float | None]] = {
    "tokens": lambda episode: episode.tokens,
    "thinking_tokens": lambda episode: episode.thinking_tokens,
    "thinking_words": lambda episode: episode.thinking_words,
}
"""Measures of length, which are reported with quantiles."""


class Result(msgspec.Struct):
    """What one model came to; `failure` says why there are no numbers, where there are none."""

    name: str
    source: str
    examples: int = 0
    samples: int = 0
    """Of each example."""
    estimates: dict[str, Estimate] = msgspec.field(default_factory=dict)
    lengths: dict[str, Spread] = msgspec.field(default_factory=dict)
    """By measure, over the episodes that have it."""
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    failure: str = ""
    run: str = ""
    """The run that it is of, where it is of one."""
    step: int | None = None
    """After which of the run's optimizer steps, for a checkpoint."""
    thinking_tags: list[tuple[str, str]] = msgspec.field(default_factory=list)
    """Those between which thoughts were looked for."""
    notices: list[str] = msgspec.field(default_factory=list)
    """What makes a number mean less than it seems to."""


class Score(NamedTuple):
    """What models are compared by, and what it is called in pictures."""

    measure: str
    name: str


def score_of(measured: Sequence[Collection[str]], samples: int) -> Score:
    """Return accuracy where all models have one, else the mean reward.

    `measured` has the names of the measures of each model.
    """
    binary = all("pass@1" in names for names in measured)
    return Score("pass@1", "accuracy") if binary else Score(f"avg@{samples}", "mean reward")


def result_of(name: str, source: str, scored: Sequence[Scored], samples: int, correct: Correctness) -> Result:
    """`scored` has as many samples of each example as there are."""
    by_key: dict[str, list[Scored]] = {}
    for episode in scored:
        by_key.setdefault(episode.key, []).append(episode)
    groups = list(by_key.values())
    whole = [[episode for episode in group if not episode.error] for group in groups]
    values = {f"avg@{samples}": _means(whole, lambda episode: episode.reward)}
    right = [[correct.value(each.rewards | each.metrics, each.reward) for each in group] for group in whole]
    values |= {f"pass@{k}": rates for k, rates in pass_rates(right, samples, correct.solved).items()}
    readings: dict[str, Callable[[Scored], float | None]] = {
        "format": lambda episode: episode.in_format,
        **LENGTH_OF,
        "thinks": lambda episode: episode.thinking_words is not None,
        "truncated": lambda episode: episode.truncated,
    }
    values |= {measure: _means(whole, read) for measure, read in readings.items()}
    values["failed"] = _means(groups, lambda episode: bool(episode.error))
    for part in sorted({part for group in whole for episode in group for part in episode.rewards}):
        values[f"reward/{part}"] = _means(whole, lambda episode, part=part: episode.rewards.get(part))  # type: ignore[misc]
    for part in sorted({part for group in whole for episode in group for part in episode.metrics}):
        values[f"metric/{part}"] = _means(whole, lambda episode, part=part: episode.metrics.get(part))  # type: ignore[misc]
    estimates = {measure: estimate(known) for measure, known in values.items() if known}
    errors = Counter(episode.error for episode in scored if episode.error)
    return Result(name, source, len(groups), samples, estimates, lengths_of(scored), dict(sorted(errors.items())))


def lengths_of(scored: Sequence[Scored]) -> dict[str, Spread]:
    """Return how each measure of length is spread over the episodes that ended and have it."""
    ended = [episode for episode in scored if not episode.error]
    values = {
        name: [value for episode in ended if (value := read(episode)) is not None] for name, read in LENGTH_OF.items()
    }
    return {name: spread_of(known) for name, known in values.items() if known}


def unmatched_tags(scored: Sequence[Scored], pairs: Sequence[tuple[str, str]]) -> str | None:
    """Return the notice that no completion has thoughts between these tags; None where one has."""
    if any(episode.thinking_words is not None for episode in scored):
        return None
    looked_for = " or ".join(f"{opening}...{closing}" for opening, closing in pairs)
    return f"no completion has {looked_for}: thinking is not measured. --think-tags OPENING CLOSING sets other tags."


def failures(result: Result) -> str | None:
    """Return the notice that more than `MAX_FAILED_SHARE` of the episodes failed; None where fewer did."""
    share = result.estimates["failed"].value
    if share <= MAX_FAILED_SHARE:
        return None
    reasons = ", ".join(f"{count} {reason}" for reason, count in result.errors.items())
    return f"{share:.0%} of the episodes failed and are left out of every mean ({reasons})."


def _means(groups: Iterable[Sequence[Scored]], read: Callable[[Scored], float | None]) -> list[float]:
    """By example, the mean over its samples that have a value; examples of which none has are left out."""
    known = [[float(value) for episode in group if (value := read(episode)) is not None] for group in groups]
    return [sum(several) / len(several) for several in known if several]


class ZeroShot(msgspec.Struct):
    """A line of the record with which `token_utilisation_reward` compares: how the base model fared on an example."""

    key: str
    correct: bool
    thinking_tokens: int


def zero_shot_of(scored: Sequence[Scored]) -> list[ZeroShot]:
    """One line per example: right if most of its samples are, with their mean length. What only failed has none."""
    if any(episode.thinking_tokens is None and episode.thinking_words is not None for episode in scored):
        raise BadInput(
            "the record counts thoughts in tokens, and the server has chat completions alone, without token ids",
            key="--zero-shot",
            fix="Give --tokenizer DIR.",
        )
    by_key: dict[str, list[Scored]] = {}
    for episode in scored:
        if not episode.error:
            by_key.setdefault(episode.key, []).append(episode)
    return [
        ZeroShot(
            key,
            2 * sum(episode.correct for episode in group) > len(group),
            round(sum(episode.thinking_tokens or 0 for episode in group) / len(group)),
        )
        for key, group in by_key.items()
    ]
