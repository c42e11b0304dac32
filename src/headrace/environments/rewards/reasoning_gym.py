"""Reward by the scorer of a reasoning-gym family, for samples of the data provider `reasoning_gym`."""

from __future__ import annotations

from headrace.environments.rewards.base import Counts, Data, SandboxReward
from headrace.environments.rewards.registry import register_reward
from headrace.environments.strict_format import format_of

SCORE = "headrace.environments.adapters.reasoning_gym_family:score"
MAX_ANSWER_CHARACTERS = 100_000
"""The longest gold answers, moves of Hanoi's tower, have a third of that."""


@register_reward("reasoning_gym_reward")
class ReasoningGymReward(SandboxReward):
    """The score, from 0 to 1, that the task's reasoning-gym family gives to the boxed answer of the strict format.

    An answer on which the scorer fails, or takes longer than `timeout` seconds, scores 0 and is counted.
    """

    name = "reasoning_gym"
    timeout_counter = failure_counter = "scorer_errors"

    def __init__(self, timeout: float = 5.0, processes: int = 2) -> None:
        counts = Counts("reasoning_gym_reward", scorer_errors="answers that a scorer failed on")
        super().__init__(timeout, processes, counts, untrusted=True)  # some scorers evaluate the answer

    async def __call__(self, text: str, data: Data) -> float:
        parsed = format_of(data).parse(text)
        if parsed is None:
            return 0.0
        task = {"question": data["question"], "answer": data["answer"], "metadata": data["metadata"]}
        return await self.score(data["family"], data["settings"], parsed.answer, task) or 0.0

    async def score(self, family: str, settings: Data, answer: str, task: Data) -> float | None:
        """Return the family's score of an answer, 0 for one that is too long; None if the scorer fails on it."""
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return 0.0
        score = await self._check(SCORE, family, dict(settings), answer, dict(task))
        return None if score is None else float(score)
