"""Families of reasoning-gym: `id = "reasoning-gym:knights_knaves"`, with the family's own settings among the `args`.

No process that runs episodes imports the library. Tasks are made by a separate process, and answers are scored in
sandboxes: some scorers evaluate an answer as Python or as algebra, which may never return.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.environments.adapters.reasoning_gym_family import Request, tasks_of_family
from headrace.environments.arguments import BadArgument, check_flag, check_mistakes, check_whole
from headrace.environments.base import Context, Environment
from headrace.environments.chat import Chat
from headrace.environments.rewards.strict_rewards import ReasoningGymReward
from headrace.environments.script import perturb_reply
from headrace.environments.shipped.common import check_split, extract_tagged, tag
from headrace.rollout.types import Message, Rollout, Task

INSTRUCTIONS = (
    "Think step by step. Then write the final answer, and nothing else, between <answer> and </answer>, in the format "
    "that the question asks for."
)


class ReasoningGym(Environment):
    """Tasks of one `family`; `settings` are the family's own, for its difficulty.

    The answer must be between <answer> tags, exactly once; `instructions` follow the question. With `terse` there are
    no instructions and the whole reply is the answer. No question is in both splits.

    The reward is the family's own score, from 0 to 1. An answer on which the scorer fails or times out scores 0 and is
    counted in the metric `scorer_error`.
    """

    def __init__(
        self,
        family: str,
        split: str = "train",
        num_tasks: int = 500,
        seed: int = 0,
        terse: bool = False,
        instructions: str = INSTRUCTIONS,
        system: str | None = None,
        demonstrate_mistakes: float = 0.0,
        **settings: Any,
    ) -> None:
        check_split(split)
        check_whole("num_tasks", num_tasks, 1)
        check_whole("seed", seed, 0)
        check_flag("terse", terse)
        check_mistakes(demonstrate_mistakes)
        if terse and instructions != INSTRUCTIONS:
            fix = "Leave out instructions or terse."
            raise BadArgument("terse prompts have no instructions", key="instructions", value=instructions, fix=fix)
        try:
            self._settings: dict[str, Any] = msgspec.to_builtins(settings)
        except TypeError as error:
            raise BadArgument(f"expected plain values: {error}") from error
        self._request = Request(family, self._settings, split, num_tasks, seed)
        self._terse = terse
        self._instructions = instructions
        self._system = system
        self.demonstrate_mistakes = demonstrate_mistakes
        self._tasks: list[dict[str, Any]] | None = None
        self._reward = ReasoningGymReward()

    def tasks(self) -> list[dict[str, Any]]:
        if self._tasks is None:
            self._tasks = tasks_of_family(self._request)
        return self._tasks

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        chat = Chat(context, self.question(task.data), system=self._system)
        await chat.reply()
        answer = chat.text if self._terse else extract_tagged(chat.text, "answer")
        call = self._request.family, self._settings, (answer or "").strip(), task.data
        score = await self._reward.score(*call) if answer else 0.0
        metrics = {"solved": float(score == 1.0), "answered": float(bool(answer)), "scorer_error": float(score is None)}
        return [chat.rollout({"score": score or 0.0}, metrics)]

    def question(self, data: dict[str, Any]) -> str:
        """Return the prompt of a task."""
        question = str(data["question"])
        return question if self._terse or not self._instructions else f"{question}\n\n{self._instructions}"

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        return self._write_reply(str(task.data["answer"]))

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> str:
        return self._write_reply(str(perturb_reply(str(task.data["answer"]), rng)))

    async def close(self) -> None:
        await self._reward.close()

    def _write_reply(self, answer: str) -> str:
        return answer if self._terse else tag("answer", answer)
