"""The numbers of a model from its episodes: means over examples with bootstrap intervals, and failures by reason.

Each number is the mean over examples of the mean over an example's samples. Failed episodes are left out of all of them
and counted as `failed`, as in the evaluations of a run. Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from headrace.errors import BadInput
from headrace.orchestrator.batch_metrics import MAX_FAILED_SHARE, pass_rates
from headrace.tools.common import INTERVAL, bootstrap_means
from headrace.tools.evaluate.completions import Correctness, ScoredEpisode

RESAMPLES = 1000


class Estimate(msgspec.Struct, frozen=True):
    """A mean over examples with its interval."""

    value: float
    low: float
    high: float


class Spread(msgspec.Struct, frozen=True):
    """Distribution of the values of single episodes; `p5` is the 5% quantile, `std` is divided by n."""

    median: float
    std: float
    min: float
    p5: float
    p25: float
    p75: float
    p95: float
    max: float


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """Return the mean of one value per example with its bootstrap percentile interval.

    The same seed draws the same examples for all models.
    """
    array = np.asarray(values, np.float64)
    low, high = np.quantile(bootstrap_means(array, RESAMPLES, np.random.default_rng(seed)), INTERVAL)
    return Estimate(float(array.mean()), float(low), float(high))


LENGTH_OF: dict[str, Callable[[ScoredEpisode], float | None]] = {
    "tokens": lambda episode: episode.tokens,
    "thinking_tokens": lambda episode: episode.thinking_tokens,
    "thinking_words": lambda episode: episode.thinking_words,
}
"""Measures of length, which are reported with quantiles."""


class ModelResult(msgspec.Struct):
    """The numbers of one model; `failure` is the reason if it could not be evaluated."""

    name: str
    source: str
    examples: int = 0
    samples: int = 0
    """Samples per example."""
    estimates: dict[str, Estimate] = msgspec.field(default_factory=dict)
    lengths: dict[str, Spread] = msgspec.field(default_factory=dict)
    """By measure: the distribution over the episodes that have it."""
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    failure: str = ""
    run: str = ""
    """The directory of the model's run, if it has one."""
    step: int | None = None
    """The optimizer step of a checkpoint."""
    thinking_tags: list[tuple[str, str]] = msgspec.field(default_factory=list)
    """The tags around reasoning."""
    notices: list[str] = msgspec.field(default_factory=list)
    """Warnings about the numbers."""


class ScoreMeasure(NamedTuple):
    """The measure that models are compared by, and its label in charts."""

    measure: str
    name: str


def choose_score(measures: Sequence[Collection[str]], samples: int) -> ScoreMeasure:
    """Return accuracy if all models have it, else the mean reward; `measures` has the names of each model."""
    binary = all("pass@1" in names for names in measures)
    return ScoreMeasure("pass@1", "accuracy") if binary else ScoreMeasure(f"avg@{samples}", "mean reward")


def compute_result(
    name: str, source: str, scored: Sequence[ScoredEpisode], samples: int, correct: Correctness
) -> ModelResult:
    """Compute a model's numbers from all its episodes, `samples` of each example."""
    by_key: dict[str, list[ScoredEpisode]] = {}
    for episode in scored:
        by_key.setdefault(episode.key, []).append(episode)
    groups = list(by_key.values())
    succeeded = [[episode for episode in group if not episode.error] for group in groups]
    values = {f"avg@{samples}": _means(succeeded, lambda episode: episode.reward)}
    scores = [[correct.value(each.rewards | each.metrics, each.reward) for each in group] for group in succeeded]
    values |= {f"pass@{k}": rates for k, rates in pass_rates(scores, samples, correct.solved).items()}
    readings: dict[str, Callable[[ScoredEpisode], float | None]] = {
        "format": lambda episode: episode.in_format,
        **LENGTH_OF,
        "thinks": lambda episode: episode.thinking_words is not None,
        "truncated": lambda episode: episode.truncated,
    }
    values |= {measure: _means(succeeded, read) for measure, read in readings.items()}
    values["failed"] = _means(groups, lambda episode: bool(episode.error))
    episodes = [episode for group in succeeded for episode in group]
    for part in sorted({part for episode in episodes for part in episode.rewards}):
        values[f"reward/{part}"] = _means(succeeded, lambda episode, part=part: episode.rewards.get(part))  # type: ignore[misc]
    for part in sorted({part for episode in episodes for part in episode.metrics}):
        values[f"metric/{part}"] = _means(succeeded, lambda episode, part=part: episode.metrics.get(part))  # type: ignore[misc]
    estimates = {measure: estimate(of_measure) for measure, of_measure in values.items() if of_measure}
    lengths = {}
    for measure, read in LENGTH_OF.items():
        if of_episodes := [value for episode in episodes if (value := read(episode)) is not None]:
            least, p5, p25, median, *above = np.quantile(of_episodes, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1]).tolist()
            lengths[measure] = Spread(median, float(np.std(of_episodes)), least, p5, p25, *above)
    errors = Counter(episode.error for episode in scored if episode.error)
    return ModelResult(name, source, len(groups), samples, estimates, lengths, dict(sorted(errors.items())))


def notices(result: ModelResult, scored: Sequence[ScoredEpisode]) -> Iterator[str]:
    """Yield a warning if no completion has reasoning between the tags, and if more than `MAX_FAILED_SHARE` failed."""
    if all(episode.thinking_words is None for episode in scored):
        tags = " or ".join(f"{opening}...{closing}" for opening, closing in result.thinking_tags)
        yield f"no completion has {tags}: thinking is not measured. --think-tags OPENING CLOSING sets other tags."
    if (share := result.estimates["failed"].value) > MAX_FAILED_SHARE:
        reasons = ", ".join(f"{count} {reason}" for reason, count in result.errors.items())
        yield f"{share:.0%} of the episodes failed and are left out of every mean ({reasons})."


def _means(groups: Iterable[Sequence[ScoredEpisode]], read: Callable[[ScoredEpisode], float | None]) -> list[float]:
    """Return the mean of each example over its samples that have a value; examples without values are left out."""
    values = [[float(value) for episode in group if (value := read(episode)) is not None] for group in groups]
    return [sum(of_example) / len(of_example) for of_example in values if of_example]


class ZeroShot(msgspec.Struct):
    """A line of the record of a base model's results by example, which `token_utilisation_reward` reads."""

    key: str
    correct: bool
    thinking_tokens: int


def zero_shot_record(scored: Sequence[ScoredEpisode]) -> list[ZeroShot]:
    """Return one line per example: correct if most of its samples are, and their mean length; failures are skipped."""
    if any(episode.thinking_tokens is None and episode.thinking_words is not None for episode in scored):
        fact = "the record needs the length of reasoning in tokens, and the server does not return token ids"
        raise BadInput(fact, key="--zero-shot", fix="Set --tokenizer DIR.")
    by_key: dict[str, list[ScoredEpisode]] = {}
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
