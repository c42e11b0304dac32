"""Episodes with scripted replies instead of a model: for demonstrations, probing and tests."""

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
from headrace.inference.schema import StructuredOutputs
from headrace.rollout.types import Message, Rollout, Task, Turn

AnswerFunction = Callable[[Sequence[Message]], Message | str | Reply]
"""Returns the next reply to a conversation: a text, a message (perhaps with tool calls), or a whole reply."""
Answer = AnswerFunction
"""The earlier name, in tests that `headrace new environment` wrote."""

MAX_EMPTY_EPISODES = 100
"""Episodes in a row without a trainable rollout before `demonstrate` gives up."""
_NUMBER = re.compile(r"\d{1,15}")


class Script:
    """A context with scripted replies. `calls` has the messages and tools of each call."""

    def __init__(self, answer: AnswerFunction) -> None:
        self._answer = answer
        self.calls: list[tuple[list[Message], list[dict[str, Any]]]] = []

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        max_tokens: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> Reply:
        self.calls.append((list(messages), list(tools)))
        return as_reply(self._answer(messages))

    def tools_of(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the tools of the call whose messages have the longest prefix in common with these."""

        def prefix_length(call: tuple[list[Message], list[dict[str, Any]]]) -> int:
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(call[0], messages, strict=False)))

        return max(self.calls, key=prefix_length)[1] if self.calls else []


def as_reply(answer: Message | str | Reply) -> Reply:
    """Return a reply without tokens."""
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
    empty = np.empty(0)
    return Reply(message, Turn(empty, empty, empty, empty, 1.0), calls, raw)


def call_tool(name: str, /, **arguments: Any) -> Message:
    """Return an assistant message that calls one tool."""
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


async def play(environment: Environment, task: Task, answer: AnswerFunction) -> tuple[list[Rollout], Script]:
    """Run one episode with scripted replies; return its rollouts and the script."""
    script = Script(answer)
    return await environment.run(task, script), script


def demonstrate(environment: Environment, seed: int) -> Iterator[Demonstration]:
    """Yield endless episodes on random tasks with gold replies, a share `demonstrate_mistakes` of them mistakes.

    Rollouts that failed or are not trainable are skipped.
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
        empty_episodes = 0
        while empty_episodes < MAX_EMPTY_EPISODES:
            task = rng.choice(tasks)
            rollouts, script = loop.run_until_complete(play(environment, task, answer))
            usable = [rollout for rollout in rollouts if rollout.trainable and rollout.error is None]
            yield from (Demonstration(rollout.messages, script.tools_of(rollout.messages)) for rollout in usable)
            empty_episodes = 0 if usable else empty_episodes + 1
        raise BadInput(
            f"{type(environment).__name__} has nothing to demonstrate: in {MAX_EMPTY_EPISODES} episodes in a row with "
            "gold replies, every rollout failed or is not trainable"
        )
    finally:
        loop.run_until_complete(environment.close())
        loop.close()


def perturb_reply(answer: Message | str, rng: random.Random) -> Message | str:
    """Return the reply with its last number changed, or else a letter; in every argument of its tool calls, if any."""
    if isinstance(answer, str):
        return _perturb_text(answer, rng)
    changed = dict(answer)
    if changed.get("tool_calls"):
        changed["tool_calls"] = [_perturb_call(call, rng) for call in changed["tool_calls"]]
    else:
        changed["content"] = _perturb_text(str(changed.get("content") or ""), rng)
    return changed


def _perturb_text(text: str, rng: random.Random) -> str:
    """Change the last number of a text, or else a random letter; append "x" if it has neither."""
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


def _perturb_call(call: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    arguments = dict(call["function"]["arguments"])
    for name, value in arguments.items():
        if isinstance(value, str):
            arguments[name] = _perturb_text(value, rng)
        elif isinstance(value, int | float):
            arguments[name] = value + rng.randint(1, 9)
    return {**call, "function": {**call["function"], "arguments": arguments}}
