"""What it takes to train the agent beside this file as it is: how it is called, its tasks, what its answers are worth.

`gold` and `mistake` are for the demonstrations of sft.toml, which the agent itself plays.
"""

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from calculator_agent import CalculatorAgent, calculate
from openai import AsyncOpenAI

from headrace.environments.script import call_tool, perturb_reply

client = AsyncOpenAI(api_key="of the episode")  # one for all episodes: each has its own address, and making one is slow


async def run(data: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    agent = CalculatorAgent(client.with_options(base_url=base_url, api_key=api_key), model)
    return await agent.answer(data["question"])


def tasks(split: str = "train", count: int = 2000) -> Iterator[dict[str, Any]]:
    """Different for the two splits: every tenth expression is held out."""
    made: set[str] = set()
    rng = random.Random(split)
    while len(made) < count:
        expression = f"{rng.randrange(100)}{rng.choice('+-*')}{rng.randrange(100)}"
        held_out = zlib.crc32(expression.encode()) % 10 == 0
        if expression not in made and held_out == (split == "eval"):
            made.add(expression)
            yield {"question": f"{expression}=?", "expression": expression, "answer": str(calculate(expression))}


def reward(result: str, data: dict[str, Any], messages: Sequence[dict[str, Any]]) -> float:
    return float(result.strip() == data["answer"])


def gold(data: dict[str, Any], messages: Sequence[dict[str, Any]]) -> Any:
    """The tool first, then what it says."""
    if messages[-1]["role"] == "tool":
        return messages[-1]["content"]
    return call_tool("calc", e=data["expression"])


def mistake(data: dict[str, Any], messages: Sequence[dict[str, Any]], rng: random.Random) -> Any:
    """A guess instead of a call, another expression, or another number than the tool's."""
    if messages[-1]["role"] != "tool" and rng.random() < 0.5:
        return perturb_reply(data["answer"], rng)
    return perturb_reply(gold(data, messages), rng)
