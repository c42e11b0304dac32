"""Completions in the strict format, a tokenizer whose tokens are letters, and the scores of a reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, processors

from headrace.environments.rewards import Rewards
from headrace.environments.rewards.base import SampleData
from headrace.environments.rewards.running import Score
from headrace.environments.strict_format import StrictFormat

STRICT = StrictFormat()


def thought(words: int, answer: str = "4") -> str:
    """So many words of thinking, then the answer in its box."""
    return STRICT.write(" ".join(["so"] * words), answer)


async def scores_of(
    reward: Any, texts: Sequence[str], answer: str = "4", prompts: Sequence[str] | None = None, **info: Any
) -> list[Score]:
    """Return the score of each completion by a reward in any form."""
    data = [SampleData(prompt, answer, info) for prompt in prompts or ["2+2?"] * len(texts)]
    return (await Rewards({"mine": reward}, in_threads=True).score_group(texts, data))["mine"]


def write_tokenizer(directory: Path) -> Path:
    """One token for each letter, and one before each text that only special tokens are counted with."""
    directory.mkdir(parents=True)
    backend = tokenizers.Tokenizer(models.WordLevel({"[U]": 0, "[B]": 1, "s": 2, "o": 3}, unk_token="[U]"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split("", behavior="isolated")]
    )
    backend.post_processor = processors.TemplateProcessing(single="[B] $A", special_tokens=[("[B]", 1)])
    backend.save(str(directory / "tokenizer.json"))
    return directory
