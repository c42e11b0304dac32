"""The environment of a data provider, rewards and an objective: `id = "hackable"`.

One prompt, one completion. Rewards see the whole completion, thoughts included, and the whole group. A completion for
which a reward or the objective fails is marked with the reason, and counted; the others keep their reward. The progress
of the policy follows from the versions of the group's tokens alone, so that a resumed run is in the same stage of its
objective.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from operator import itemgetter
from typing import Any

import msgspec

from headrace.environments.arguments import check_number
from headrace.environments.hackable.registry import (
    NO_TRACE,
    Objective,
    Progress,
    Trace,
    TrainingSample,
    build_data_provider,
    build_objective,
)
from headrace.environments.rewards.base import REWARDS, AnyReward, build_rewards, options_by_reward
from headrace.environments.rewards.running import RewardFailure, Rewards, Score, describe_failure, read_scores
from headrace.environments.rewards.strict_rewards import count_words, make_length_counter, measure_thinking
from headrace.environments.single_turn import Row, SingleTurn
from headrace.environments.strict_format import format_of
from headrace.rollout.digest import fingerprint
from headrace.rollout.types import Message, Rollout, RolloutError, Task

log = logging.getLogger(__name__)

OBJECTIVE = "objective"
"""The name, among those of rewards, under which an objective's own failures are counted."""


class Scored(msgspec.Struct, frozen=True):
    """The scores of one completion by the names of the rewards, and the reward that the objective combines them to.

    With an `error` there is no `reward`, and `scores` has those of the rewards that did not fail.
    """

    scores: dict[str, float]
    reward: float | None = None
    error: RolloutError | None = None


class Scorer:
    """The rewards of an objective; `timeout` limits one call of a reward, in seconds, unless it is `bounded`."""

    def __init__(self, objective: Objective, rewards: Mapping[str, AnyReward], timeout: float = 60.0) -> None:
        self._objective = objective
        self._rewards = Rewards(rewards, timeout=timeout, in_threads=True)
        self._failures: Counter[str] = Counter()
        self._reported: set[str] = set()

    async def score(
        self,
        samples: Sequence[TrainingSample],
        completions: Sequence[str],
        progress: Progress | None = None,
        traces: Sequence[Trace] | None = None,
    ) -> list[Scored]:
        """Score each completion of a group, or of several groups. Failures of rewards are counted, never raised."""
        traces = [NO_TRACE] * len(completions) if traces is None else traces
        if len(samples) != len(completions):
            raise ValueError(f"expected one completion per sample, got {len(completions)} for {len(samples)} samples")
        table = await self._rewards.score_group(completions, [sample.data for sample in samples])
        rows = [{name: column[index] for name, column in table.items()} for index in range(len(samples))]
        failures = [next((s for s in row.values() if isinstance(s, RewardFailure)), None) for row in rows]
        whole = [index for index, failure in enumerate(failures) if failure is None]
        scores = {name: [column[index] for index in whole] for name, column in table.items()}
        parts = [samples[i] for i in whole], [completions[i] for i in whole], [traces[i] for i in whole]
        combined = iter(self._combine(scores, *parts, progress or Progress()))
        results = [next(combined) if failure is None else failure for failure in failures]
        return [self._record(row, result) for row, result in zip(rows, results, strict=True)]

    @property
    def counts(self) -> dict[str, int]:
        """Completions without a reward, by `REWARD/REASON`, and the rewards' own counters, by `REWARD/NAME`."""
        own = {
            f"{name}/{counter}": count
            for name, reward in self._rewards.rewards.items()
            for counter, count in getattr(reward, "counts", {}).items()
        }
        return {**own, **self._failures}

    async def close(self) -> None:
        await self._rewards.close()

    def _combine(
        self,
        scores: Mapping[str, Sequence[Any]],
        samples: Sequence[TrainingSample],
        completions: Sequence[str],
        traces: Sequence[Trace],
        progress: Progress,
    ) -> list[Score]:
        """Return the objective's reward of each completion that every reward has scored."""
        if not samples:
            return []
        try:
            objective = self._objective.at(progress)
            combined = objective.combine_rewards(scores, samples)
            arguments = samples, completions, traces
            accepted = signature(objective.extra_reward).parameters  # an objective may leave out the traces
            extra = objective.extra_reward(*(arguments if len(accepted) > 2 else arguments[:2]))
        except Exception as error:
            return [describe_failure(OBJECTIVE, "the objective", error)] * len(samples)
        results = read_scores(OBJECTIVE, "combine_rewards of the objective", combined, len(samples))
        if extra is None:
            return results
        extras = read_scores(OBJECTIVE, "extra_reward of the objective", extra, len(samples))
        return [
            a if isinstance(a, RewardFailure) else b if isinstance(b, RewardFailure) else a + b
            for a, b in zip(results, extras, strict=True)
        ]

    def _record(self, row: Mapping[str, Score], result: Score) -> Scored:
        """Return the scores of a completion; a failure is counted, and logged once per place."""
        scores = {name: score for name, score in row.items() if not isinstance(score, RewardFailure)}
        if not isinstance(result, RewardFailure):
            return Scored(scores, result)
        counter = f"{result.name}/{result.reason}"
        self._failures[counter] += 1
        if result.traceback and result.place not in self._reported:
            log.error("%s; further failures at the same place are only counted\n%s", result.text, result.traceback)
        elif self._failures[counter] == 1:
            log.warning("%s; the completion is marked, and further ones as %s are only counted", result.text, counter)
        self._reported.add(result.place)
        return Scored(scores, error=RolloutError(result.reason, result.text))


REWARD = "objective"
"""The name of a rollout's only reward; the scores that it was combined from are metrics."""
TOKENIZER = "tokenizer_name"
"""The kwarg of rewards that count tokens; its default is the environment's tokenizer."""

Kwargs = Mapping[str, Any]


class Hackable(SingleTurn):
    """Samples of a `provider`, rewarded by an `objective`: registered names, import paths or files.

    `groups_per_step` is the number of prompts in a training step, from which epochs of the training data are computed.
    An environment that evaluates other data has the `provider` and `kwargs` of the training data in `trained_on`.
    `tokenizer_name` counts the tokens of thoughts, unless a reward sets its own; in a run its default is the model.
    """

    def __init__(
        self,
        provider: str,
        provider_kwargs: Kwargs | None = None,
        objective: str = "token_grpo",
        objective_kwargs: Kwargs | None = None,
        reward_kwargs: Mapping[str, Kwargs] | None = None,
        reward_timeout: float = 60.0,
        seed: int = 0,
        groups_per_step: float | None = None,
        trained_on: Kwargs | None = None,
        tokenizer_name: str | None = None,
        demonstrate_mistakes: float = 0.0,
    ) -> None:
        check_number("reward_timeout", reward_timeout, 0, 1e9)
        if groups_per_step is not None:
            check_number("groups_per_step", groups_per_step, 0, 1e9)
        self._data = build_data_provider(provider, provider_kwargs, seed)
        self._objective = build_objective(objective, objective_kwargs)
        names = self._objective.reward_names()
        kwargs = add_tokenizer(names, options_by_reward(names, reward_kwargs or {}), tokenizer_name)
        self._scorer = Scorer(self._objective, build_rewards(names, kwargs), reward_timeout)
        self._tokens = make_length_counter(tokenizer_name) if tokenizer_name else None
        self._groups_per_step = groups_per_step
        self._trained_on = None
        if trained_on is not None:
            self._trained_on = build_data_provider(trained_on["provider"], trained_on.get("kwargs"), seed)
        self._samples_per_epoch = 0
        share = demonstrate_mistakes
        super().__init__(self._read_rows, itemgetter("prompt"), {}, raw=True, demonstrate_mistakes=share)

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        rows = [self._find_row(rollout) for rollout in rollouts]
        samples = [TrainingSample(row["prompt"], row["answer"], row["info"]) for row in rows]
        completions = [str(rollout.messages[-1]["content"]) for rollout in rollouts]
        step = max((rollout.newest_version or 0 for rollout in rollouts), default=0)
        progress = Progress(step, self._compute_epochs(step))
        metrics, roles = self._objective.at(progress).metrics(), self._objective.roles()
        lengths = self._measure_lengths(samples, completions)
        last_turns = [rollout.turns[-1] if rollout.turns else None for rollout in rollouts]
        traces = [
            NO_TRACE if turn is None else Trace(turn.completion_ids, turn.logprobs, turn.latents) for turn in last_turns
        ]
        scored = await self._scorer.score(samples, completions, progress, traces)
        for rollout, result, length in zip(rollouts, scored, lengths, strict=True):
            by_role = {role: result.scores[name] for role, name in roles.items() if name in result.scores}
            rollout.metrics = {**rollout.metrics, **result.scores, **by_role, **length, **metrics}
            rollout.error = rollout.error or result.error
            rollout.rewards = {} if result.reward is None else {REWARD: result.reward}

    async def close(self) -> None:
        await self._scorer.close()
        await super().close()

    def thinking_tags(self, task: Task) -> tuple[str, str]:
        return format_of(task.data["info"]).tags

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        """Return the solution as thoughts, then the answer; for samples whose `info` has a `solution`."""
        info = task.data["info"]
        if "solution" not in info:
            raise NotImplementedError("no gold reply: the samples of this provider have no info.solution")
        return format_of(info).write(str(info["solution"]), task.data["answer"])

    def _read_rows(self) -> Iterator[Row]:
        """Yield the samples as tasks.

        A repeated question with other `info` is a separate task: a fingerprint of `info` is appended to its key.
        Records of other runs are found for both, since `info` has the common key.
        """
        first: dict[str, TrainingSample] = {}
        for sample in self._data:
            same_key = first.setdefault(sample.key, sample)
            same_question = (same_key.prompt, same_key.answer) == (sample.prompt, sample.answer)
            repeated = same_question and same_key.info != sample.info
            key = f"{sample.key}-{fingerprint([sample.info]).digest[:8]}" if repeated else sample.key
            yield {"key": key, "prompt": sample.prompt, "answer": sample.answer, "info": sample.info}

    def _compute_epochs(self, step: int) -> float:
        """Return the passes over the training data after `step` steps, as if every prompt had been trained on."""
        if self._groups_per_step is None:
            return 0.0
        if not self._samples_per_epoch:
            samples = self.tasks() if self._trained_on is None else self._trained_on
            self._samples_per_epoch = sum(1 for _ in samples)
        return step * self._groups_per_step / self._samples_per_epoch

    def _measure_lengths(self, samples: Sequence[TrainingSample], completions: Sequence[str]) -> list[dict[str, float]]:
        """Return the thinking lengths of each completion as metrics, none for a malformed one."""
        infos = [sample.info for sample in samples]
        measures = {"thinking_words": count_words, **({"thinking_tokens": self._tokens} if self._tokens else {})}
        columns = {name: measure_thinking(completions, infos, measure) for name, measure in measures.items()}
        return [
            {name: float(length) for name, column in columns.items() if (length := column[index]) is not None}
            for index in range(len(samples))
        ]


def add_tokenizer(names: Sequence[str], kwargs: Mapping[str, Kwargs], tokenizer: str | None) -> dict[str, Kwargs]:
    """Return the kwargs of rewards, with the tokenizer added to those that count tokens and set no other."""
    counting = [name for name in names if tokenizer and TOKENIZER in REWARDS.options(name)]
    return {**kwargs, **{name: {TOKENIZER: tokenizer, **kwargs.get(name, {})} for name in counting}}
