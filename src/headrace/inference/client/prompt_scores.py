"""How likely a served model finds the tokens of a prompt: the doors to that which servers have, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from headrace.inference.client.openai_client import OpenAIClient, OpenAIFailed

CERTAINLY_NOT = -9999.0
"""What vLLM writes for minus infinity."""
ROUNDING = 1e-3
"""How far above 0 a logprob may come out of arithmetic that rounds."""


class Door(Enum):
    """Where a server gives scores: as vLLM and our own do, as vLLM also does, as OpenAI once did."""

    GENERATE = "/inference/v1/generate"
    PROMPT_LOGPROBS = "/completions with prompt_logprobs"
    ECHO = "/completions with echo"


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None


_Scores = list[float | None]
_Table = dict[int, _Entry]
"""By token id: the one that is there, and perhaps others."""


class _Generated(msgspec.Struct):
    prompt_logprobs: list[_Table | None] | None = None


class _Echoed(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[_Table | None] | None = None
    logprobs: _Echoed | None = None


class _Completed(msgspec.Struct):
    choices: list[_Choice]


async def prompt_scores(client: OpenAIClient, door: Door, ids: Sequence[int], temperature: float) -> np.ndarray:
    """The logprob of each token after those before it; 0.0 for the first. Raises `OpenAIError`."""
    found = await _ask(client, door, ids, temperature)
    if found is None:
        raise OpenAIFailed(f"{client.address} gave no scores through {door.value}")
    if len(found) != len(ids):
        raise OpenAIFailed(f"{client.address} gave {len(found)} scores for {len(ids)} tokens through {door.value}")
    scores = np.array([0.0, *(math.nan if score is None else score for score in found[1:])])
    usable = np.isfinite(scores) & (scores > CERTAINLY_NOT) & (scores <= ROUNDING)
    if not usable.all():
        place = int(np.argmin(usable))
        fault = "above 0" if ROUNDING < scores[place] < math.inf else "not finite"
        raise OpenAIFailed(
            f"{client.address} gave token {ids[place]}, at position {place}, a logprob that is {fault} "
            f"({found[place]}) through {door.value}"
        )
    return scores


async def _ask(client: OpenAIClient, door: Door, ids: Sequence[int], temperature: float) -> _Scores | None:
    """As many as the server gives; None where it gives none."""
    body: dict[str, Any] = {"model": client.model}
    # Our own engine gives a request with a seed the same bits in any company.
    sampling = {"max_tokens": 1, "temperature": temperature, "seed": 0}
    if door is Door.GENERATE:
        body |= {"token_ids": ids, "sampling_params": {**sampling, "prompt_logprobs": 0}}
        return _of_tokens((await client.ask(door.value, _Generated, body, at_root=True)).prompt_logprobs, ids)
    body |= {"prompt": ids, **sampling}
    body |= {"echo": True, "logprobs": 1} if door is Door.ECHO else {"prompt_logprobs": 0}
    choices = (await client.ask("/completions", _Completed, body)).choices
    choice = choices[0] if choices else _Choice()
    if door is Door.PROMPT_LOGPROBS:
        return _of_tokens(choice.prompt_logprobs, ids)
    echoed = None if choice.logprobs is None else choice.logprobs.token_logprobs
    # What the model wrote itself comes last, if it wrote anything.
    return echoed[:-1] if echoed is not None and len(echoed) == len(ids) + 1 else echoed


def _of_tokens(tables: list[_Table | None] | None, ids: Sequence[int]) -> _Scores | None:
    """The logprobs of these tokens, and not of those that could have been there instead."""
    if tables is None:
        return None
    if len(tables) != len(ids):
        return [None] * len(tables)  # whose they are is not known, and they are of no use
    entries = [None if table is None else table.get(token) for table, token in zip(tables, ids, strict=True)]
    return [None if entry is None else entry.logprob for entry in entries]
