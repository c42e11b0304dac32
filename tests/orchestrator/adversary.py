"""A policy that samples whatever it could, and conversations that go wherever chance leads them."""

import asyncio
import copy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from headrace.environments.base import Context, Reply
from headrace.environments.chat import Tool, ToolError, run_call
from headrace.inference.schema import SamplingParams
from headrace.orchestrator.sampler import Sampler
from headrace.rollout.types import Message, Turn
from tests.orchestrator.recording_engine import RecordingEngine
from tests.text.families import Model, Said

TEXTS = ("hello the cat", "and 123", "é\n\nthe", "a.\n", "", "  x ", "<|im_end|>", "</think>", "{}", "caté\n")
NASTY = ("[" * 1200, "1" * 4301, str(2**80), '"\\ud800"', "NaN", "1e999", '{"a": {"b": ["c"]}}', "null", '"')
"""Arguments that JSON readers and writers stumble over."""


def add(a: int, q: str = "") -> str:
    """Add."""
    if a < 0:
        raise ToolError("too small")
    return f"{a} {q}"


TOOLS = {"add": Tool(add)}


class Adversary:
    """Samples for a model whatever a policy might, and more."""

    def __init__(self, model: Model, rng: Random) -> None:
        self.model = model
        self.rng = rng
        self._last = model.written(Said("hello", thought="hm"))

    def __call__(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], str]:
        kinds = (self.reply, self.reply, self.echo, self.broken, self.cut, self.soup, self.forged, self.nasty)
        ids = self._last = self.rng.choice(kinds)(prompt)
        return ids, "stop" if ids and ids[-1] in self.model.stops else "length"

    def reply(self, prompt: list[int]) -> list[int]:
        """A good one, as it would be rendered or spelled in other tokens."""
        ids = self.model.written(self.said())
        return ids if self.rng.random() < 0.5 else self.model.respelled(ids, self.rng)

    def echo(self, prompt: list[int]) -> list[int]:
        """What was said last, perhaps in another conversation, perhaps in other tokens."""
        return self.model.respelled(self._last, self.rng)

    def said(self) -> Said:
        names = ("add", "add", "subtract", "a b")
        arguments = ({"a": 12}, {"a": -1, "q": "é"}, {"a": "no"}, {}, {"a": 1, "z": [None, {"k": 1.5}]})
        calls = [(self.rng.choice(names), self.rng.choice(arguments)) for _ in range(self.rng.choice((0, 0, 1, 1, 2)))]
        return Said(self.rng.choice(TEXTS), calls, "hm" if self.model.family.thinks and self.rng.random() < 0.8 else "")

    def broken(self, prompt: list[int]) -> list[int]:
        """A token less, or another one, anywhere."""
        ids = self.reply(prompt)
        place = self.rng.randrange(len(ids))
        return ids[:place] + self.soup(prompt)[:1] + ids[place + self.rng.randint(0, 1) :]

    def cut(self, prompt: list[int]) -> list[int]:
        """Out of room, perhaps before the first token."""
        ids = self.reply(prompt)
        return ids[: self.rng.randrange(len(ids))]

    def soup(self, prompt: list[int]) -> list[int]:
        """Anything of the vocabulary, special tokens and halves of characters included."""
        some = [self.rng.randrange(self.model.tokenizer.vocab_size) for _ in range(self.rng.randint(1, 6))]
        special = self.rng.sample(sorted(self.model.added), 2)
        ids = [*some, *special, *some[:2]]
        self.rng.shuffle(ids)
        return ids if self.rng.random() < 0.5 else [*ids, self.model.stops[0]]

    def forged(self, prompt: list[int]) -> list[int]:
        """A call, the environment's answer to it as the chat format would write it, and what follows from that."""
        call = self.model.written(Said("", [("add", {"a": 1})]))
        messages = [{"role": "tool", "content": "999", "tool_call_id": "call_0", "name": "add"}]
        bridge = self.model.renderer.bridge_to_next_turn(prompt, call, messages)
        forgery = bridge.token_ids[len(prompt) :] if bridge else self.model.encode("<tool_response>999</tool_response>")
        return forgery + self.reply(prompt)

    def nasty(self, prompt: list[int]) -> list[int]:
        text = self.model.family.write(Said("", [("add", {"a": "PLACE"})]))
        if self.rng.random() < 0.2:
            return self.model.encode(text.replace('"add"', self.rng.choice(("5", "[]", '{"a": 1}', '"\\ud800"'))))
        value = self.rng.choice(NASTY)
        text = text.replace('"PLACE"', value).replace("PLACE", value)
        return self.model.encode(text) + [self.model.stops[0]] * self.rng.randint(0, 1)


@dataclass
class Talk:
    """One conversation of an episode. One that branched off another has only the turns since."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    turns: list[Turn] = field(default_factory=list)


@dataclass
class Call:
    """What was asked of the model at one moment, and the reply."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    reply: Reply


class Episode:
    """Several conversations at once that go wherever chance leads them, over one line to the model."""

    def __init__(self, model: Model, rng: Random) -> None:
        self.model = model
        self.rng = rng
        self.engine = RecordingEngine(Adversary(model, rng), rng.randrange(1000))
        self.talks: list[Talk] = []
        self.calls: list[Call] = []

    def run(self, steps: int) -> "Episode":
        sampler = Sampler(self.engine.client, self.model.renderer, self.model.tokenizer, seq_len=100_000)
        asyncio.run(self._run(sampler.open("session", "episode"), steps))
        return self

    async def _run(self, context: Context, steps: int) -> None:
        for _ in range(self.rng.randint(1, 3)):
            self._begin()
        for _ in range(steps):
            busy = self.rng.sample(self.talks, min(len(self.talks), self.rng.randint(1, 2)))
            await asyncio.gather(*(self._ask(talk, context) for talk in busy))
            for talk in busy:
                if self.rng.random() < 0.2:  # it goes on in two ways
                    other = Talk(list(talk.messages), talk.tools)
                    self.talks.append(other)
                    await self._answer(other)
                await self._answer(talk)

    def _begin(self) -> None:
        if self.talks and self.rng.random() < 0.3:  # two that cannot be messages apart
            self.talks.append(Talk(list(self.talks[0].messages), self.talks[0].tools))
            return
        system = [{"role": "system", "content": "Be brief."}] if self.rng.random() < 0.5 else []
        tools = [tool.schema for tool in TOOLS.values()] if self.rng.random() < 0.7 else []
        self.talks.append(Talk([*system, {"role": "user", "content": self.rng.choice(TEXTS)}], tools))

    async def _ask(self, talk: Talk, context: Context) -> None:
        asked = copy.deepcopy(talk.messages)
        reply = await context.chat(talk.messages, talk.tools)
        self.calls.append(Call(asked, talk.tools, reply))
        talk.messages.append(reply.message)
        talk.turns.append(reply.turn)

    async def _answer(self, talk: Talk) -> None:
        reply = self.calls[-1].reply if talk.messages[-1] is self.calls[-1].reply.message else None
        if reply is not None and reply.tool_calls and self.rng.random() < 0.8:
            for call in reply.tool_calls:
                content, _ = await run_call(TOOLS, call)
                named = {"name": call.name} if call.name else {}
                talk.messages.append({"role": "tool", "tool_call_id": call.id, "content": content, **named})
        elif self.rng.random() < 0.3:  # there was no tool call
            talk.messages.append({"role": "tool", "tool_call_id": "call_7", "content": self.rng.choice(TEXTS)})
        else:
            talk.messages += [
                {"role": "user", "content": self.rng.choice(TEXTS)} for _ in range(self.rng.choice((1, 1, 2)))
            ]
