"""Models that score and continue sequences: the `Reference` interface, and a frozen served model, such as a teacher.

Requests contain the policy's token ids, so a served model must have the policy's vocabulary; `check` verifies that
before a run begins. What a server does not report cannot be checked, and is logged. Servers offer prompt logprobs
through several routes; the first one that works is used.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np

from headrace.errors import BadInput, Failure
from headrace.inference.client.openai_client import ModelEntry, OpenAIClient, OpenAIError, OpenAIFailed, OpenAIRejected
from headrace.inference.client.served_model import ServedModel
from headrace.inference.schema import MIN_LOGPROB

if TYPE_CHECKING:
    from headrace.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")

TEXTS = (
    "The miller opened the gate at 5:30, and 1024 litres a second ran down the headrace.\n\n",
    "def f(x):\n    return [x ** 2, '</p>']\n",
    "Größe, naïveté, мельница, 水車, طاحونة, 🌊",
)
"""Texts that both tokenizers must split the same way."""
PROBE_TOKENS = 16
"""Tokens of the first text that are scored to find a route."""
PROBE_TEMPERATURE = 2.0
MIN_TEMPERATURE_EFFECT = 0.03
"""Mean difference of a token's logprobs at two temperatures below which the server ignores the temperature."""
MAX_SHOWN_IDS = 8
"""Token ids in a message."""
MAX_ROUNDING = 1e-3
"""How far above 0 a logprob may be due to rounding."""


class ReferenceFailed(Failure):
    """A model could not score or continue a sequence. The message names the model and the reason."""


class Generated(msgspec.Struct):
    """Tokens that a model sampled."""

    token_ids: list[int]
    finish_reason: str
    """`stop` or `length`."""


class Reference(Protocol):
    """A model that scores and continues sequences of the policy's token ids."""

    name: str
    """The model and its address, for messages."""

    async def check(self, tokenizer: Tokenizer, seq_len: int, temperature: float = 1.0) -> int | None:
        """Raise `BadInput` unless it can score up to `seq_len` of this tokenizer's ids at that temperature.

        Returns its `max_model_len`, of which scoring uses one token, or None if unknown.
        """

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        """Return the logprob of every token given those before it; 0.0 for the first. Raises `ReferenceFailed`."""

    async def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Generated:
        """Return tokens sampled after these, up to and including a stop token. Raises `ReferenceFailed`.

        A server that returns text alone is the exception: its text, encoded, has no stop token at its end.
        """

    async def close(self) -> None:
        """Close the connections; the model's server keeps running."""


class LimitedReference:
    """A `Reference` with at most `max_concurrent` requests at once; others wait."""

    def __init__(self, reference: Reference, max_concurrent: int) -> None:
        self._reference = reference
        self._permits = asyncio.Semaphore(max_concurrent)
        self.name = reference.name
        self.check, self.close = reference.check, reference.close

    async def score(self, *arguments: Any, **options: Any) -> np.ndarray:
        async with self._permits:
            return await self._reference.score(*arguments, **options)

    async def generate(self, *arguments: Any, **options: Any) -> Generated:
        async with self._permits:
            return await self._reference.generate(*arguments, **options)


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Health(msgspec.Struct):
    vocab_size: int


class FrozenModel:
    """A served model as a `Reference` whose weights never change."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.name = served.name
        self._tokenizer: Tokenizer | None = None
        self._routes: dict[OpenAIClient, ScoreRoute] = {}
        self._ignore_temperature: set[OpenAIClient] = set()
        """Servers that score at temperature 1 regardless of the request, as vLLM does."""

    async def check(self, tokenizer: Tokenizer, seq_len: int, temperature: float = 1.0) -> int | None:
        """Check that every server has the model, prompt logprobs, the policy's vocabulary and `seq_len` tokens.

        Returns the smallest `max_model_len` that a server reports.
        """
        self._tokenizer = tokenizer
        entries = await self._served.check()
        for client, entry in zip(self._served.clients, entries, strict=True):
            unchecked = [*self._check_length(client, entry, seq_len), *await self._check_vocabulary(client, tokenizer)]
            await self._check_scores(client, tokenizer, seq_len)
            if client in self._ignore_temperature and temperature != 1:
                fact = f"{self._label(client)} scores at temperature 1 only"
                fix = "Set it to 1 for this environment, or serve the model with headrace serve."
                raise BadInput(fact, key="sampling.temperature", value=temperature, fix=fix)
            if client in self._ignore_temperature:
                log.info("%s scores at temperature 1 regardless of the request", self._label(client))
            if unchecked:
                log.warning("%s does not report %s: not checked", self._label(client), " or ".join(unchecked))
        return min((entry.max_model_len for entry in entries if entry and entry.max_model_len), default=None)

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        ids = [int(token) for token in token_ids]
        try:
            return await self._served.call(lambda client: self._score(client, ids, temperature))
        except OpenAIError as error:
            raise ReferenceFailed(f"{self.name} did not score a sequence of {len(ids)} tokens: {error}") from error

    async def generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Generated:
        ids = [int(token) for token in token_ids]
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
        sampling |= {"stop_token_ids": list(map(int, stop_token_ids))} if stop_token_ids else {}
        sampling |= {} if seed is None else {"seed": seed}
        try:
            return await self._served.call(lambda client: self._generate(client, ids, sampling))
        except OpenAIError as error:
            raise ReferenceFailed(f"{self.name} did not continue {len(ids)} tokens: {error}") from error

    async def close(self) -> None:
        await self._served.close()

    async def _generate(self, client: OpenAIClient, ids: list[int], sampling: dict[str, Any]) -> Generated:
        """Sample from one server, by the route that works there. Raises `OpenAIError`."""
        if self._routes.get(client, ScoreRoute.GENERATE) is ScoreRoute.GENERATE:
            body = {"model": client.model, "token_ids": ids, "sampling_params": sampling}
            response = await client.request(ScoreRoute.GENERATE.value, _Completed, body, at_root=True)
        else:
            body = {"model": client.model, "prompt": ids, **sampling}
            response = await client.request("/completions", _Completed, body)
        if not response.choices:
            raise OpenAIFailed(f"the response of {client.address} has no choices")
        choice = response.choices[0]
        tokens = choice.token_ids
        if tokens is None and choice.text is not None and self._tokenizer is not None:
            tokens = self._tokenizer.encode(choice.text)
        if tokens is None:
            raise OpenAIFailed(f"{client.address} returned neither token_ids nor text")
        return Generated(tokens, choice.finish_reason or "stop")

    async def _score(self, client: OpenAIClient, ids: list[int], temperature: float) -> np.ndarray:
        if temperature != 1 and client in self._ignore_temperature:
            raise OpenAIFailed(
                f"{client.address} scores at temperature 1 only, and the samples have {temperature:g}: sample at 1, or "
                "serve the model with headrace serve"
            )
        return await prompt_scores(client, self._routes.get(client, ScoreRoute.GENERATE), ids, temperature)

    def _check_length(self, client: OpenAIClient, entry: ModelEntry | None, seq_len: int) -> list[str]:
        """Raise `BadInput` if the server cannot score `seq_len` tokens; return what it does not report."""
        if entry is None or entry.max_model_len is None:
            return ["its max_model_len"]
        if entry.max_model_len < seq_len + 1:
            fact = f"scoring needs one token more, and {self._label(client)} has max_model_len = {entry.max_model_len}"
            fix = f"Serve it with max_model_len = {seq_len + 1} or more, or lower seq_len."
            raise BadInput(fact, key="seq_len", value=seq_len, fix=fix)
        return []

    async def _check_vocabulary(self, client: OpenAIClient, tokenizer: Tokenizer) -> list[str]:
        """Raise `BadInput` if the server splits texts otherwise than the policy; return what it does not report."""
        required = _highest_id(tokenizer) + 1
        # Only our server reports its size; `_check_scores` tries the highest id on every server.
        health = await self._request_if_there(client, "/health", _Health, _lacks_route)
        if health is not None and health.vocab_size < required:
            raise self._vocabulary_error(client, f"it has {health.vocab_size} tokens, and the policy has {required}")
        for text in (*TEXTS, tokenizer.eos_token or TEXTS[0]):
            body = {"model": self._served.model, "prompt": text, "add_special_tokens": False}
            tokenized = await self._request_if_there(
                client, "/tokenize", _Tokenized, lambda error: error.status in (404, 405, 501), body
            )
            if tokenized is None:
                return ["how it splits text (it has no /tokenize)"]
            if tokenized.tokens != (ours := tokenizer.encode(text)):
                theirs = _shorten(tokenized.tokens)
                raise self._vocabulary_error(client, f"{text!r} is {theirs} there and {_shorten(ours)} in the policy's")
        return []

    async def _request_if_there(
        self,
        client: OpenAIClient,
        route: str,
        kind: type[T],
        is_missing: Callable[[OpenAIError], bool],
        body: Mapping[str, Any] | None = None,
    ) -> T | None:
        """Make a request, with retries; None if the error shows that the server does not have the route."""
        try:
            return await self._served.retry(lambda: client.request(route, kind, body, at_root=True))
        except OpenAIError as error:
            if is_missing(error):
                return None
            raise BadInput(f"the vocabulary of {self._label(client)} cannot be checked: {error}") from error

    async def _check_scores(self, client: OpenAIClient, tokenizer: Tokenizer, seq_len: int) -> None:
        """Find a route, then score the highest id through it, at another temperature."""
        ids = [*tokenizer.encode(TEXTS[0]), 0, 0][: max(2, min(PROBE_TOKENS, seq_len - 1))]
        highest = _highest_id(tokenizer)
        self._ignore_temperature.discard(client)
        try:
            self._routes[client], scores = await self._find_route(client, ids)
        except OpenAIError as error:
            raise BadInput(f"{self._label(client)} does not score: {error}") from error
        try:
            tempered = await self._served.retry(lambda: self._score(client, [*ids, highest], PROBE_TEMPERATURE))
        except OpenAIError as error:
            reason = f"it does not score the policy's highest token id, {highest} ({error})"
            raise self._vocabulary_error(client, reason) from error
        if np.abs(scores - tempered[: len(ids)])[1:].mean() < MIN_TEMPERATURE_EFFECT:
            self._ignore_temperature.add(client)

    async def _find_route(self, client: OpenAIClient, ids: list[int]) -> tuple[ScoreRoute, np.ndarray]:
        """Return the first route that scores `ids`, and their logprobs. Raises `BadInput` if there is none."""
        errors: list[str] = []
        for route in ScoreRoute:
            try:
                return route, await self._served.retry(partial(prompt_scores, client, route, ids, 1.0))
            except OpenAIError as error:
                if not _lacks_route(error):
                    raise
                errors.append(str(error))
        raise BadInput(
            f"{self._label(client)} returns no logprobs of a prompt through any route: {'; '.join(errors)}",
            fix="Serve it with vLLM or headrace serve.",
        )

    def _vocabulary_error(self, client: OpenAIClient, reason: str) -> BadInput:
        return BadInput(
            f"{self._label(client)} has another vocabulary than the policy: {reason}",
            fix="Choose a model with the policy's tokenizer.",
        )

    def _label(self, client: OpenAIClient) -> str:
        return f"{self._served.model} at {client.address}"


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


class _PromptScores(msgspec.Struct):
    prompt_logprobs: list[_Table | None] | None = None


class _Echoed(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    text: str | None = None
    finish_reason: str | None = None
    prompt_logprobs: list[_Table | None] | None = None
    logprobs: _Echoed | None = None


class _Completed(msgspec.Struct):
    choices: list[_Choice]


async def prompt_scores(client: OpenAIClient, route: ScoreRoute, ids: Sequence[int], temperature: float) -> np.ndarray:
    """Return the logprob of each token given those before it; 0.0 for the first. Raises `OpenAIError`."""
    received = await _request_logprobs(client, route, ids, temperature)
    if received is None:
        raise OpenAIFailed(f"{client.address} returned no logprobs through {route.value}")
    if len(received) != len(ids):
        raise OpenAIFailed(
            f"{client.address} returned {len(received)} logprobs for {len(ids)} tokens through {route.value}"
        )
    scores = np.array([0.0, *(math.nan if score is None else score for score in received[1:])])
    usable = np.isfinite(scores) & (scores > MIN_LOGPROB) & (scores <= MAX_ROUNDING)
    if not usable.all():
        place = int(np.argmin(usable))
        fault = "above 0" if MAX_ROUNDING < scores[place] < math.inf else "not finite"
        raise OpenAIFailed(
            f"{client.address} returned a logprob that is {fault} ({received[place]}) for token {ids[place]} at "
            f"position {place} through {route.value}"
        )
    return scores


async def _request_logprobs(
    client: OpenAIClient, route: ScoreRoute, ids: Sequence[int], temperature: float
) -> _Scores | None:
    """Request the prompt logprobs of `ids`, and return them as received; None if the response has none."""
    body: dict[str, Any] = {"model": client.model}
    # With a seed, our engine's result does not depend on the other requests of the batch.
    sampling = {"max_tokens": 1, "temperature": temperature, "seed": 0}
    if route is ScoreRoute.GENERATE:
        body |= {"token_ids": ids, "sampling_params": {**sampling, "prompt_logprobs": 0}}
        response = await client.request(route.value, _PromptScores, body, at_root=True)
        return _logprobs_of_tokens(response.prompt_logprobs, ids)
    body |= {"prompt": ids, **sampling}
    body |= {"echo": True, "logprobs": 1} if route is ScoreRoute.ECHO else {"prompt_logprobs": 0}
    choices = (await client.request("/completions", _Completed, body)).choices
    choice = choices[0] if choices else _Choice()
    if route is ScoreRoute.PROMPT_LOGPROBS:
        return _logprobs_of_tokens(choice.prompt_logprobs, ids)
    echoed = None if choice.logprobs is None else choice.logprobs.token_logprobs
    # The sampled token is last, if the server sampled one.
    return echoed[:-1] if echoed is not None and len(echoed) == len(ids) + 1 else echoed


def _logprobs_of_tokens(tables: list[_Table | None] | None, ids: Sequence[int]) -> _Scores | None:
    """Return the logprobs of these tokens, without the alternatives."""
    if tables is None:
        return None
    if len(tables) != len(ids):
        return [None] * len(tables)  # which tokens they belong to is unknown
    entries = [None if table is None else table.get(token) for table, token in zip(tables, ids, strict=True)]
    return [None if entry is None else entry.logprob for entry in entries]


def _lacks_route(error: OpenAIError) -> bool:
    """Whether the error shows that a server does not have a route, or another one of that name."""
    if isinstance(error, OpenAIRejected):
        return error.status not in (401, 403)
    return type(error) is OpenAIFailed and error.status is None


def _highest_id(tokenizer: Tokenizer) -> int:
    return max(tokenizer.backend.get_vocab().values())


def _shorten(ids: list[int]) -> str:
    return str(ids) if len(ids) <= MAX_SHOWN_IDS else f"[{', '.join(map(str, ids[:MAX_SHOWN_IDS]))}, ...]"
