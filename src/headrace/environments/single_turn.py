"""Environments of one prompt, one reply and some rewards. `@environment` makes one from a prompt function.

```
def words(split="train"):
    for word in ("river", "wheel", "mill"):
        yield {"word": word, "answer": word.upper()}

@environment(data=words, rewards={"exact": Exact("answer")})
def shout(row):
    return f"Write {row['word']} in capitals."
```
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace.environments.arguments import bind_args, check_mistakes
from headrace.environments.base import Context, Environment
from headrace.environments.chat import Chat
from headrace.environments.rewards.base import SampleData
from headrace.environments.rewards.running import RewardFailure, Rewards
from headrace.environments.script import perturb_reply
from headrace.rollout.types import Message, Rollout, RolloutError, Task

Row = dict[str, Any]
Prompt = Callable[[Row], str | Sequence[Message]]
RewardTable = Mapping[str, Any] | Sequence[Any]
"""Rewards, or their names, by the name of the score; see `Rewards`."""


class SingleTurn(Environment):
    """An environment of one prompt and one reply per task.

    `rows` are the tasks; `prompt` returns the prompt of one, a text or messages, `gold` the answer with the highest
    reward. The rows, or the function that returns them, are read when the tasks are first used: a process that only
    runs episodes holds none of them.

    Rewards see the reply's text; with `raw`, the whole completion with reasoning and markup. `metrics` are scored
    in the same way and are not part of the reward. Group rewards are scored when all episodes of a task have finished.
    """

    def __init__(
        self,
        rows: Iterable[Row] | Callable[[], Iterable[Row]],
        prompt: Prompt,
        rewards: RewardTable,
        *,
        metrics: RewardTable = (),
        system: str | None = None,
        gold: Callable[[Row], str] | None = None,
        raw: bool = False,
        timeout: float = 60.0,
        demonstrate_mistakes: float = 0.0,
    ) -> None:
        check_mistakes(demonstrate_mistakes)
        self.demonstrate_mistakes = demonstrate_mistakes
        self._rows = rows
        self._tasks: list[Row] | None = None
        self._rows_by_key: dict[str, Row] = {}
        self._prompt = prompt
        self._rewards = Rewards(rewards, timeout=timeout)
        self._metrics = Rewards(metrics, timeout=timeout, argument="metrics")
        self._system = system
        self._gold = gold
        self._raw = raw

    def tasks(self) -> list[Row]:
        if self._tasks is None:
            self._tasks = list(self._rows() if callable(self._rows) else self._rows)
        return self._tasks

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        chat = Chat(context, self._prompt(task.data), system=self._system)
        reply = await chat.reply()
        assert reply is not None, "a conversation has a first reply"
        text = reply.raw if self._raw else reply.text
        if self.scores_groups and self._raw:
            chat.messages[-1] = {"role": "assistant", "content": text}  # group rewards read the recorded message
        rewards = await self._rewards.score(text, task.data)
        rollout = chat.rollout(rewards, await self._metrics.score(text, task.data))
        rollout.env, rollout.task_key = task.env, task.key
        return [rollout]

    @property
    def scores_groups(self) -> bool:
        overridden = type(self).score_group is not SingleTurn.score_group
        return overridden or self._rewards.have_groups or self._metrics.have_groups

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        """Add the scores of group rewards; the other rewards were scored with their episodes."""
        rows = [self._find_row(rollout) for rollout in rollouts]
        texts = [str(rollout.messages[-1]["content"]) for rollout in rollouts]
        texts = texts if self._raw else [text.strip("\n") for text in texts]
        prompts = [prompt if isinstance(prompt := self._prompt(row), str) else prompt[-1]["content"] for row in rows]
        data = [SampleData(str(prompt), row.get("answer", ""), row) for prompt, row in zip(prompts, rows, strict=True)]
        for table, target in ((self._rewards, "rewards"), (self._metrics, "metrics")):
            for name, column in (await table.score_group(texts, data, group_rewards_only=True)).items():
                for rollout, score in zip(rollouts, column, strict=True):
                    if isinstance(score, RewardFailure):
                        rollout.error = rollout.error or RolloutError(score.reason, score.text)
                    else:
                        setattr(rollout, target, {**getattr(rollout, target), name: score})

    def _find_row(self, rollout: Rollout) -> Row:
        """Return the data of a rollout's task: a group is scored without its task, perhaps in another process."""
        if not self._rows_by_key:
            own_keys = (key if isinstance(key := row.get("key"), str) else "" for row in self.tasks())
            tasks = (Task(rollout.env, row, key) for row, key in zip(self.tasks(), own_keys, strict=True))
            self._rows_by_key = {task.key: task.data for task in tasks}
        return self._rows_by_key[rollout.task_key]

    async def close(self) -> None:
        await self._rewards.close()
        await self._metrics.close()

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        if self._gold is not None:
            return self._gold(task.data)
        if "answer" in task.data:
            return str(task.data["answer"])
        return str(super().gold(task, messages))

    def mistake(self, task: Task, messages: Sequence[Message], rng: random.Random) -> Message | str:
        """Return the gold reply for a wrong `answer`, where the gold reply depends on it."""
        answer = task.data.get("answer")
        if isinstance(answer, str):
            wrong = Task(task.env, {**task.data, "answer": perturb_reply(answer, rng)}, task.key)
            if (mistaken := self.gold(wrong, messages)) != self.gold(task, messages):
                return mistaken
        return super().mistake(task, messages, rng)


def environment(
    *, data: Callable[..., Iterable[Row]], rewards: RewardTable, metrics: RewardTable = (), **settings: Any
) -> Callable[[Prompt], type[SingleTurn]]:
    """Make an environment of the decorated function, which takes a row and returns the prompt, a text or messages.

    `data` yields the rows; its keyword arguments are the `args` of the run file, which may also replace `rewards` and
    `metrics`. Further settings are those of `SingleTurn`: `system`, `gold`, `raw` and `timeout`. Without `gold` the
    best answer is the row's `answer`.
    """

    def make(prompt: Prompt) -> type[SingleTurn]:
        class Made(SingleTurn):
            def __init__(
                self, demonstrate_mistakes: float = 0.0, rewards: RewardTable = rewards, metrics: RewardTable = metrics,
                **args: Any,
            ) -> None:  # fmt: skip
                own: dict[str, Any] = {"metrics": metrics, "demonstrate_mistakes": demonstrate_mistakes, **settings}
                super().__init__(bind_args(data, args, caller=type(self)), prompt, rewards, **own)

        Made.__name__ = Made.__qualname__ = prompt.__name__
        Made.__module__, Made.__doc__ = prompt.__module__, prompt.__doc__
        return Made

    return make
