"""Environments with one flaw each, which a probe must find. `Asking(flaw=...)` says which."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import resource
import time
from collections.abc import Sequence
from typing import Any

from headrace.environments.base import Context, Environment, EpisodeError
from headrace.environments.chat import Chat
from headrace.environments.script import call_tool
from headrace.rollout.types import Message, Rollout, Task

ASKING = f"{__name__}:Asking"
FLAWED = f"{__name__}:Flawed"
CALLING = f"{__name__}:Calling"
DUEL = f"{__name__}:Duel"
BIDDING = f"{__name__}:Bidding"
FLAWS = ("", "contains", "crash", "library", "regex", "sleep", "wait", "stubborn", "memory", "nan", "refuse", "exit")
"""Of a scorer, by the task."""


class Asking(Environment):
    """A number is asked for and compared; a flaw changes how. "careless" has several that are none of the scorer's."""

    def __init__(self, flaw: str = "", path: str = "") -> None:
        self.flaw = flaw
        self.path = path

    def tasks(self) -> list[dict[str, Any]]:
        if self.flaw == "slow tasks":
            time.sleep(60)
        if self.flaw == "careless":  # the order of a set of texts is another one in each process
            return [{"word": word} for word in {"north", "east", "south", "west", "up", "down", "left", "right"}]
        return [{"number": number} for number in (12, 34, 56, 56)]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        chat = Chat(context, f"Say {task.data.get('number')}.", system="You count.")
        reply = await chat.reply()
        assert reply is not None
        print("noise on the standard output")
        flaw = task.data.get("flaw", self.flaw)
        return [chat.rollout({"right": await self.score(flaw, reply.text, str(task.data.get("number")))})]

    async def score(self, flaw: str, text: str, gold: str) -> float:
        match flaw:
            case "contains":
                return float(gold in text)
            case "crash":
                return float(int(text or 0) == int(gold))
            case "library":
                return float(json.loads(text) == int(gold))
            case "regex":
                return float(re.fullmatch(r"(a+)+b\n.*", text) is None and text == gold)
            case "sleep":
                time.sleep(0.15)  # noqa: ASYNC251 - that is the flaw
            case "wait":
                await asyncio.sleep(0 if text == gold else 60)
            case "stubborn" if text != gold:
                while True:
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(60)
            case "memory":
                return float(resource.getrlimit(resource.RLIMIT_DATA)[0])  # which is -1 where there is none
            case "careless":
                return random.random()
            case "nan":
                return float("nan")
            case "refuse" if text != gold:
                raise EpisodeError("not_for_me", "this is no answer")
            case "exit" if not text:
                os._exit(3)
            case "generous":
                return 1.0
        return float(text == gold)

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        if self.flaw in ("no gold", "careless"):
            return str(super().gold(task, messages))
        if self.flaw == "gold fails":
            return str(task.data["no such field"])
        return str(task.data.get("number"))

    async def close(self) -> None:
        if self.path:
            with open(self.path, "a") as file:  # noqa: ASYNC230
                file.write("closed\n")
        if self.flaw == "careless":
            raise RuntimeError("nothing is open")


class Flawed(Asking):
    """A task for each flaw of a scorer."""

    def tasks(self) -> list[dict[str, Any]]:
        return [{"number": 12, "flaw": flaw} for flaw in FLAWS]


class Calling(Environment):
    """A tool must be called with the task's word. The conversation of the second task has no end."""

    def __init__(self, trusting: bool = False) -> None:
        self.trusting = trusting

    def tasks(self) -> list[dict[str, Any]]:
        return [{"word": "mill"}, {"word": "wheel", "endless": True}]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        called = []

        def press(word: str) -> str:
            """Press the button with this word."""
            called.append(word)
            return "pressed"

        endless = task.data.get("endless", False)
        chat = Chat(context, "Press a button.", tools=[press], max_turns=None if endless else 3)
        while endless and await chat.reply():
            chat.say("And then?")
        reply = await chat.act()
        found = float(task.data["word"] in called)
        if self.trusting:  # believes whatever calls tools, or says so
            found = float(reply is None or found or "Correct" in reply.text)
        return [chat.rollout({"found": found, "brief": 0.1 * found})]

    def gold(self, task: Task, messages: Sequence[Message]) -> Message | str:
        return call_tool("press", word=task.data["word"]) if messages[-1]["role"] == "user" else "Done."


class Duel(Environment):
    """Only a group can be scored: the longest answer of it wins."""

    def tasks(self) -> list[dict[str, Any]]:
        return [{"letter": "x"}]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        chat = Chat(context, "Write much.")
        await chat.reply()
        return [chat.rollout({})]

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        lengths = [len(str(rollout.messages[-1]["content"])) for rollout in rollouts]
        for rollout, length in zip(rollouts, lengths, strict=True):
            rollout.rewards = {"longest": float(length == max(lengths))}

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        return str(task.data["letter"]) * 100


class Bidding(Environment):
    """Two agents are trained at each other's cost: the longer answer wins, the first one if they are alike."""

    def tasks(self) -> list[dict[str, Any]]:
        return [{"prize": prize} for prize in range(4)]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        chats = [Chat(context, f"You are {name}. Bid for {task.data['prize']}.", agent=name) for name in "ab"]
        first, second = [len(reply.text) if (reply := await chat.reply()) else 0 for chat in chats]
        won = 1.0 if first >= second else -1.0
        return [chats[0].rollout({"won": won}), chats[1].rollout({"won": -won})]

    def gold(self, task: Task, messages: Sequence[Message]) -> str:
        return "x" * 100
