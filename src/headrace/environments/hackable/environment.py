r"""Providers, rewards and an objective as one environment of a run: `id = "hackable"`.

One prompt, one completion. Rewards see all that was written, thoughts included, and a whole group at once. How far the
policy had come when it wrote a group follows from the versions of the group's tokens, and from nothing else: a resumed
run finds the same stage of its objective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from headrace.environments.arguments import check_number
from headrace.environments.hackable.objective import Progress
from headrace.environments.hackable.registry import build_data_provider, build_objective
from headrace.environments.hackable.samples import TrainingSample
from headrace.environments.hackable.scoring import Scorer
from headrace.environments.rewards.registry import REWARDS, build_rewards, options_by_reward
from headrace.environments.rewards.thinking import length_in, thinking_lengths, words_in
from headrace.environments.single_turn import Row, SingleTurn
from headrace.environments.strict_format import format_of
from headrace.rollout.fingerprint import fingerprint
from headrace.rollout.types import Message, Rollout, Task

REWARD = "objective"
"""The name of the one reward that a rollout has; what it was combined from is among the metrics."""
TOKENIZER = "tokenizer_name"
"""The kwarg of rewards that count tokens: unset, it is the environment's own."""

Kwargs = Mapping[str, Any]


class Hackable(SingleTurn):
    """`provider` and `objective` are registered names or import paths.

    `groups_per_step` is how many prompts a training step has: with it epochs are counted, those of the data that is
    trained on. Where other data is evaluated, `trained_on` has the `provider` and `kwargs` of that. `tokenizer_name` is
    what thoughts are counted with, where a reward does not say otherwise; in a run it is the run's model, unless it is
    set.
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
        asked = self._objective.reward_names()
        kwargs = with_tokenizer(asked, options_by_reward(asked, reward_kwargs or {}), tokenizer_name)
        self._scorer = Scorer(self._objective, build_rewards(asked, kwargs), reward_timeout)
        self._tokens = length_in(tokenizer_name) if tokenizer_name else None
        self._groups_per_step = groups_per_step
        self._trained_on = None
        if trained_on is not None:
            self._trained_on = build_data_provider(trained_on["provider"], trained_on.get("kwargs"), seed)
        self._epoch = 0
        super().__init__(
            self._rows_of_data, itemgetter("prompt"), {}, raw=True, demonstrate_mistakes=demonstrate_mistakes
        )

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        rows = [self._row_of(rollout) for rollout in rollouts]
        samples = [TrainingSample(row["prompt"], row["answer"], row["info"]) for row in rows]
        completions = [str(rollout.messages[-1]["content"]) for rollout in rollouts]
        step = newest_version(rollouts)
        progress = Progress(step, self._epochs(step))
        own = self._objective.at(progress).metrics()
        lengths = self._lengths(samples, completions)
        scored = await self._scorer.score(samples, completions, progress)
        for rollout, result, length in zip(rollouts, scored, lengths, strict=True):
            rollout.metrics = {**rollout.metrics, **result.scores, **self._roles(result.scores), **length, **own}
            rollout.error = rollout.error or result.error
            rollout.rewards = {} if result.reward is None else {REWARD: result.reward}

    async def close(self) -> None:
        await self._scorer.close()
        await super().close()

    def thinking_tags(self, task: Task) -> tuple[str, str]:
        return format_of(task.data["info"]).tags

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        """The solution as thoughts, then the answer; for samples whose `info` has a `solution`."""
        info = task.data["info"]
        if "solution" not in info:
            raise NotImplementedError("no gold reply: the samples of this provider have no info.solution")
        return format_of(info).write(str(info["solution"]), task.data["answer"])

    def _rows_of_data(self) -> Iterator[Row]:
        """A question that is asked again with other `info` is a task of its own, named by the first's key and by that.

        A record of another run about the question is found for both, since `info` has the key that they share.
        """
        first: dict[str, TrainingSample] = {}
        for sample in self._data:
            known = first.setdefault(sample.key, sample)
            asked_alike = (known.prompt, known.answer) == (sample.prompt, sample.answer)
            again = asked_alike and known.info != sample.info
            key = f"{sample.key}-{fingerprint([sample.info]).digest[:8]}" if again else sample.key
            yield {"key": key, "prompt": sample.prompt, "answer": sample.answer, "info": sample.info}

    def _epochs(self, step: int) -> float:
        """Passes over the data after so many steps, as if every prompt had been trained on."""
        if self._groups_per_step is None:
            return 0.0
        if not self._epoch:
            self._epoch = len(self.tasks()) if self._trained_on is None else sum(1 for _ in self._trained_on)
        return step * self._groups_per_step / self._epoch

    def _roles(self, scores: Mapping[str, float]) -> dict[str, float]:
        return {role: scores[name] for role, name in self._objective.roles().items() if name in scores}

    def _lengths(self, samples: Sequence[TrainingSample], completions: Sequence[str]) -> list[dict[str, float]]:
        """How long each thinks; nothing about what is not in format."""
        infos = [sample.info for sample in samples]
        measures = {"thinking_words": words_in, **({"thinking_tokens": self._tokens} if self._tokens else {})}
        columns = {name: thinking_lengths(completions, infos, measure) for name, measure in measures.items()}
        return [
            {name: float(length) for name, column in columns.items() if (length := column[place]) is not None}
            for place in range(len(samples))
        ]


def newest_version(rollouts: Iterable[Rollout]) -> int:
    """The optimizer steps of the newest weights that wrote any token of a group."""
    return max((version for rollout in rollouts if (version := rollout.newest_version) is not None), default=0)


def with_tokenizer(
    asked: Iterable[str], kwargs: Mapping[str, Kwargs], tokenizer_name: str | None
) -> dict[str, dict[str, Any]]:
    """The kwargs of rewards; those that count tokens do it with this tokenizer, where they do not name another."""
    given = {name: dict(own) for name, own in kwargs.items()}
    for name in asked if tokenizer_name else ():
        if TOKENIZER in REWARDS.options(name):
            given.setdefault(name, {}).setdefault(TOKENIZER, tokenizer_name)
    return given
