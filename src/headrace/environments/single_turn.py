"""The common case: one question, one answer, some rewards. `@environment` makes an environment of a prompt.

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

from headrace.environments.arguments import bound, check_mistakes
from headrace.environments.base import Context, Environment
from headrace.environments.chat import Chat
from headrace.environments.rewards.base import Reward, Rewards
from headrace.environments.script import perturbed
from headrace.rollout.types import Message, Rollout, Task

Row = dict[str, Any]
Prompt = Callable[[Row], str | Sequence[Message]]
RewardTable = Mapping[str, Reward] | Sequence[Reward]


class SingleTurn(Environment):
    """`rows` are the tasks; `prompt` makes a text or messages of one, `gold` the answer that earns most.

    The rows, or a function that gives them, are not looked at before the tasks are asked for: a process that only runs
    episodes holds none of them.

    Rewards see the answer's text; with `raw`, all that was written, thoughts and markup included. `metrics` are scored
    alike and count for nothing.
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
        self._prompt = prompt
        self._rewards = Rewards(rewards, timeout=timeout)
        self._metrics = Rewards(metrics, timeout=timeout)
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
        rewards = await self._rewards.score(text, task.data)
        return [chat.rollout(rewards, await self._metrics.score(text, task.data))]

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
        """The gold reply as it would be for another answer, where it depends on the row's `answer`."""
        answer = task.data.get("answer")
        if isinstance(answer, str):
            wrong = Task(task.env, {**task.data, "answer": perturbed(answer, rng)}, task.key)
            if (mistaken := self.gold(wrong, messages)) != self.gold(task, messages):
                return mistaken
        return super().mistake(task, messages, rng)


def environment(
    *,
    data: Callable[..., Iterable[Row]],
    rewards: RewardTable,
    metrics: RewardTable = (),
    system: str | None = None,
    gold: Callable[[Row], str] | None = None,
    raw: bool = False,
    timeout: float = 60.0,
) -> Callable[[Prompt], type[SingleTurn]]:
    """Make an environment of the function below: it gets a row and returns the prompt, a text or messages.

    `data` yields the rows; its keyword arguments are the `args` of the run file. Without `gold` the best answer is what
    a row has under `answer`.
    """

    def make(prompt: Prompt) -> type[SingleTurn]:
        class Made(SingleTurn):
            def __init__(self, demonstrate_mistakes: float = 0.0, **args: Any) -> None:
                super().__init__(
                    bound(data, args),
                    prompt,
                    rewards,
                    metrics=metrics,
                    system=system,
                    gold=gold,
                    raw=raw,
                    timeout=timeout,
                    demonstrate_mistakes=demonstrate_mistakes,
                )

        Made.__name__ = Made.__qualname__ = prompt.__name__
        Made.__module__ = prompt.__module__
        Made.__doc__ = prompt.__doc__
        return Made

    return make
