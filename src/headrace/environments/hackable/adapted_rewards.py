"""The rewards of environments, and the scorers of reasoning-gym, which judge one answer at a time, for a batch."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.environments import rewards as single
from headrace.environments.arguments import check_choice
from headrace.environments.hackable.registry import register_reward
from headrace.environments.hackable.samples import format_of
from headrace.environments.rewards.base import close, warn_of_count
from headrace.environments.sandbox import PATIENCE, CallFailed, CallTimeout, Sandbox

PARTS = ("all", "answer")
SCORE = "headrace.environments.adapters.reasoning_gym_family:score"
LONGEST = 100_000
"""Characters of an answer that a family's scorer is given."""


class PerCompletion:
    """What `reward` gives to each completion. The data that it sees is the sample's info, its `prompt` and `answer`.

    With `part = "answer"` it sees only what the strict format boxes, and what is malformed earns 0 unseen.
    """

    def __init__(self, reward: single.Reward, part: str = "all") -> None:
        check_choice("part", part, PARTS)
        self.bounded = getattr(reward, "bounded", False)
        self._reward = reward
        self._answer_alone = part == "answer"

    async def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[str],
        infos: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        batch = zip(prompts, completions, answers, infos, strict=True)
        return list(await asyncio.gather(*(self._score(*each) for each in batch)))

    @property
    def counts(self) -> dict[str, int]:
        return {name: getattr(self._reward, name) for name in ("timeouts", "failures") if hasattr(self._reward, name)}

    async def close(self) -> None:
        await close(self._reward)

    async def _score(self, prompt: str, completion: str, answer: str, info: Mapping[str, Any]) -> float:
        if self._answer_alone:
            parsed = format_of(info).parse(completion)
            if parsed is None:
                return 0.0
            completion = parsed.answer
        value = self._reward(completion, {**info, "prompt": prompt, "answer": answer})
        return await value if inspect.isawaitable(value) else value


def per_completion(kind: Callable[..., single.Reward]) -> type[PerCompletion]:
    """A reward class that takes the kwargs of `kind`, and `part`."""

    class Adapted(PerCompletion):
        def __init__(self, *args: Any, part: str = "all", **kwargs: Any) -> None:
            super().__init__(kind(*args, **kwargs), part)

    signature = inspect.signature(kind)
    part = inspect.Parameter("part", inspect.Parameter.KEYWORD_ONLY, default="all")
    Adapted.__signature__ = signature.replace(parameters=[*signature.parameters.values(), part])  # type: ignore[attr-defined]
    Adapted.__doc__ = kind.__doc__
    Adapted.__qualname__ = Adapted.__name__ = kind.__name__
    return Adapted


for _name, _kind in {
    "code_execution_reward": single.CodeExecution,
    "exact_match_reward": single.Exact,
    "json_schema_reward": single.JsonSchema,
    "judge_reward": single.Judge,
    "math_verify_reward": single.Symbolic,
    "numeric_reward": single.Numeric,
    "regex_reward": single.Pattern,
}.items():
    register_reward(_name)(per_completion(_kind))


@register_reward("reasoning_gym_reward")
class ReasoningGymReward:
    """The family's own score, from 0 to 1, of what the strict format boxes; for samples of the provider reasoning_gym.

    What its scorer cannot take, or not within `timeout` seconds, earns 0 and is counted.
    """

    bounded = True

    def __init__(self, timeout: float = 5.0, processes: int = 2) -> None:
        self.counts: Counter[str] = Counter()
        self._timeout = timeout
        self._sandbox = Sandbox(processes)

    async def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[str],
        infos: Sequence[Mapping[str, Any]],
    ) -> list[float]:
        batch = zip(completions, answers, infos, strict=True)
        return list(await asyncio.gather(*(self._score(*each) for each in batch)))

    async def close(self) -> None:
        await self._sandbox.close()

    async def _score(self, completion: str, answer: str, info: Mapping[str, Any]) -> float:
        parsed = format_of(info).parse(completion)
        if parsed is None or len(parsed.answer) > LONGEST:
            return 0.0
        task = {"question": info["question"], "answer": answer, "metadata": info["metadata"]}
        call = SCORE, info["family"], info["settings"], parsed.answer, task
        try:
            return float(await self._sandbox.call(*call, timeout=self._timeout, patience=PATIENCE))
        except (CallFailed, CallTimeout) as error:
            if isinstance(error, CallFailed) and error.kind in ("start", "closed"):  # no fault of the answer
                raise
            self.counts["scorer_errors"] += 1
            warn_of_count("reasoning_gym_reward", f"answers that a scorer failed on ({error})", self.counts.total())
            return 0.0
