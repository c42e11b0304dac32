"""GSM8K as an environment: with its own reward for trained weights, and with a coin's for the stand-in.

The stand-in solves nothing, and a reward of 0 for everyone would leave the gradient 0. Its reward is a hash of the
text, 0 or 1: as spread as a real one, and with nothing to learn in it, so that the lengths stay as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.environments import environment
from headrace.environments.rewards.math_rewards import Numeric
from headrace.environments.shipped.word_problems import INSTRUCTION
from headrace.environments.shipped.word_problems import gsm8k as read_gsm8k

PROBLEMS = Path(__file__).parents[1] / "data/gsm8k"
"""The first 512 problems of the training split (MIT licence, beside them)."""
is_boxed_answer_right = Numeric(extract="boxed")


def rows(source: str = str(PROBLEMS)) -> Iterator[dict[str, Any]]:
    yield from read_gsm8k(source)


def exact(text: str, row: Mapping[str, Any]) -> float:
    return is_boxed_answer_right(text, row)


def coin(text: str, row: Mapping[str, Any]) -> float:
    return float(zlib.crc32(text.encode()) % 2)


def question(row: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{row['question']}\n\n{INSTRUCTION}"}]


gsm8k = environment(data=rows, rewards=[exact], metrics=[exact], raw=True)(question)
coin_for_gsm8k = environment(data=rows, rewards=[coin], metrics=[exact], raw=True)(question)
