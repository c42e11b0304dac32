"""Prompt logprobs from a served model, through any of the routes that servers offer for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from headrace.inference.client.openai_client import OpenAIClient, OpenAIFailed

MIN_LOGPROB = -9999.0
"""vLLM's value for minus infinity."""
ROUNDING = 1e-3
"""How far above 0 a logprob may be due to rounding."""


class ScoreRoute(Enum):
    """A route that returns prompt logprobs: vLLM's and ours, vLLM's second one, and OpenAI's old one."""

    GENERATE = "/inference/v1/generate"
    PROMPT_LOGPROBS = "/completions with prompt_logprobs"
    ECHO = "/completions with echo"


class _Entry(msgspec.Struct, gc=False):
    logprob: float | None


_Scores = list[float | None]
_Table = dict[int, _Entry]
"""By token id: the prompt's token, and possibly alternatives."""


class _Generated(msgspec.Struct):
    prompt_logprobs: list[_Table | None] | None = None


class _Echoed(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[_Table | None] | None = None
    logprobs: _Echoed | None = None


class _Completed(msgspec.Struct):
    choices: list[_Choice]


async def prompt_scores(client: OpenAIClient, route: ScoreRoute, ids: Sequence[int], temperature: float) -> np.ndarray:
    """Return the logprob of each token given those before it; 0.0 for the first. Raises `OpenAIError`."""
    received = await _request(client, route, ids, temperature)
    if received is None:
        raise OpenAIFailed(f"{client.address} returned no logprobs through {route.value}")
    if len(received) != len(ids):
        raise OpenAIFailed(
            f"{client.address} returned {len(received)} logprobs for {len(ids)} tokens through {route.value}"
        )
    scores = np.array([0.0, *(math.nan if score is None else score for score in received[1:])])
    usable = np.isfinite(scores) & (scores > MIN_LOGPROB) & (scores <= ROUNDING)
    if not usable.all():
        place = int(np.argmin(usable))
        fault = "above 0" if ROUNDING < scores[place] < math.inf else "not finite"
        raise OpenAIFailed(
            f"{client.address} returned a logprob that is {fault} ({received[place]}) for token {ids[place]} at "
            f"position {place} through {route.value}"
        )
    return scores


async def _request(client: OpenAIClient, route: ScoreRoute, ids: Sequence[int], temperature: float) -> _Scores | None:
    """Return the logprobs as received; None if the response has none."""
    body: dict[str, Any] = {"model": client.model}
    # With a seed, our engine's result does not depend on the other requests of the batch.
    sampling = {"max_tokens": 1, "temperature": temperature, "seed": 0}
    if route is ScoreRoute.GENERATE:
        body |= {"token_ids": ids, "sampling_params": {**sampling, "prompt_logprobs": 0}}
        return _logprobs_of((await client.request(route.value, _Generated, body, at_root=True)).prompt_logprobs, ids)
    body |= {"prompt": ids, **sampling}
    body |= {"echo": True, "logprobs": 1} if route is ScoreRoute.ECHO else {"prompt_logprobs": 0}
    choices = (await client.request("/completions", _Completed, body)).choices
    choice = choices[0] if choices else _Choice()
    if route is ScoreRoute.PROMPT_LOGPROBS:
        return _logprobs_of(choice.prompt_logprobs, ids)
    echoed = None if choice.logprobs is None else choice.logprobs.token_logprobs
    # The sampled token is last, if the server sampled one.
    return echoed[:-1] if echoed is not None and len(echoed) == len(ids) + 1 else echoed


def _logprobs_of(tables: list[_Table | None] | None, ids: Sequence[int]) -> _Scores | None:
    """Return the logprobs of these tokens, without the alternatives."""
    if tables is None:
        return None
    if len(tables) != len(ids):
        return [None] * len(tables)  # which tokens they belong to is unknown
    entries = [None if table is None else table.get(token) for table, token in zip(tables, ids, strict=True)]
    return [None if entry is None else entry.logprob for entry in entries]
