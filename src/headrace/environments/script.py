"""Episodes without a model: replies that follow a script. For demonstrations, for probing, for tests."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from headrace.environments.base import Demonstration, Environment, Reply, ToolCall, tasks_of
from headrace.errors import BadInput
from headrace.rollout.types import Message, Rollout, Task, Turn

Answer = Callable[[Sequence[Message]], Message | str | Reply]
"""The next reply to a conversation: a text, a message (perhaps with tool calls), or a whole reply."""

PATIENCE = 100
"""Episodes in a row with nothing to show before there seems to be nothing."""
_NUMBER = re.compile(r"\d{1,15}")


class Script:
    """A context that asks nobody. `calls` holds what was asked: messages and tools."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.calls: list[tuple[list[Message], list[dict[str, Any]]]] = []

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        self.calls.append((list(messages), list(tools)))
        return as_reply(self._answer(messages))

    def tools_of(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Those that were there in this conversation: of the call that has most of its beginning."""

        def in_common(call: tuple[list[Message], list[dict[str, Any]]]) -> int:
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(call[0], messages, strict=False)))

        return max(self.calls, key=in_common)[1] if self.calls else []


def as_reply(answer: Message | str | Reply) -> Reply:
    """A reply that no engine sampled: it has no tokens."""
    if isinstance(answer, Reply):
        return answer
    message: Message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    text = str(message.get("content") or "")
    thought = message.get("reasoning_content")
    raw = f"<think>\n{thought}\n</think>\n\n{text}" if thought else text
    nothing = np.empty(0)
    return Reply(message, Turn(nothing, nothing, nothing, nothing, 1.0), calls, raw)


def call_tool(name: str, /, **arguments: Any) -> Message:
    """The message with which a model calls one tool."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


async def play(environment: Environment, task: Task, answer: Answer) -> tuple[list[Rollout], Script]:
    """One episode with these replies."""
    script = Script(answer)
    return await environment.run(task, script), script


def demonstrate(environment: Environment, seed: int) -> Iterator[Demonstration]:
    """Endless episodes on random tasks with gold replies, `environment.demonstrate_mistakes` of them mistakes.

    What is not trained, or failed, is not shown.
    """
    if type(environment).gold is Environment.gold:
        fact = f"{type(environment).__name__} has no demonstrations to train on"
        raise BadInput(fact, fix="Implement its method gold(task, messages).")
    rng = random.Random(seed)
    tasks = tasks_of(environment, type(environment).__name__)

    def answer(messages: Sequence[Message]) -> Message | str:
        if rng.random() < environment.demonstrate_mistakes:
            return environment.mistake(task, messages, rng)
        return environment.gold(task, messages)

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(environment.start())
        in_vain = 0
        while in_vain < PATIENCE:
            task = rng.choice(tasks)
            rollouts, script = loop.run_until_complete(play(environment, task, answer))
            shown = [rollout for rollout in rollouts if rollout.trainable and rollout.error is None]
            yield from (Demonstration(rollout.messages, script.tools_of(rollout.messages)) for rollout in shown)
            in_vain = 0 if shown else in_vain + 1
        raise BadInput(
            f"{type(environment).__name__} has nothing to demonstrate: in {PATIENCE} episodes in a row with gold "
            "replies, every rollout failed or is not trainable"
        )
    finally:
        loop.run_until_complete(environment.close())
        loop.close()


def perturbed(answer: Message | str, rng: random.Random) -> Message | str:
    """The same reply with a mistake: its last number changed, or else a letter of it, wherever it has one."""
    if isinstance(answer, str):
        return _perturbed_text(answer, rng)
    changed = dict(answer)
    if changed.get("tool_calls"):
        changed["tool_calls"] = [_perturbed_call(call, rng) for call in changed["tool_calls"]]
    else:
        changed["content"] = _perturbed_text(str(changed.get("content") or ""), rng)
    return changed


def _perturbed_text(text: str, rng: random.Random) -> str:
    numbers = list(_NUMBER.finditer(text))
    if numbers:
        last = numbers[-1]
        return text[: last.start()] + str(int(last[0]) + rng.randint(1, 9)) + text[last.end() :]
    letters = [place for place, letter in enumerate(text) if letter.isalpha()]
    if not letters:
        return text + "x"
    place = rng.choice(letters)
    other = rng.choice([letter for letter in "abcdefghijklmnopqrstuvwxyz" if letter != text[place].lower()])
    return text[:place] + other + text[place + 1 :]


def _perturbed_call(call: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    arguments = dict(call["function"]["arguments"])
    for name, value in arguments.items():
        if isinstance(value, str):
            arguments[name] = _perturbed_text(value, rng)
        elif isinstance(value, int | float):
            arguments[name] = value + rng.randint(1, 9)
    return {**call, "function": {**call["function"], "arguments": arguments}}
