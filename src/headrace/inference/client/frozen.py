"""A frozen served model as a `Reference`: a teacher that scores what the policy sampled.

Requests contain the policy's token ids, so the model must have the policy's vocabulary; `check` verifies that before a
run begins. What a server does not report cannot be checked, and is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from headrace.errors import BadInput
from headrace.inference.client.openai_client import ModelEntry, OpenAIClient, OpenAIError, OpenAIFailed, OpenAIRejected
from headrace.inference.client.prompt_scores import ScoreRoute, prompt_scores
from headrace.inference.client.reference import ReferenceFailed
from headrace.inference.client.served_model import ServedModel

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


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Health(msgspec.Struct):
    vocab_size: int


class FrozenModel:
    """A served model as a `Reference` whose weights never change."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self.name = served.name
        self._routes: dict[OpenAIClient, ScoreRoute] = {}
        self._ignore_temperature: set[OpenAIClient] = set()
        """Servers that score at temperature 1 regardless of the request, as vLLM does."""

    async def check(self, tokenizer: Tokenizer, seq_len: int, temperature: float = 1.0) -> int | None:
        """Check that every server has the model, prompt logprobs, the policy's vocabulary and `seq_len` tokens.

        Returns the smallest `max_model_len` that a server reports.
        """
        entries = await self._served.check()
        for client, entry in zip(self._served.clients, entries, strict=True):
            unchecked = [*self._check_length(client, entry, seq_len), *await self._check_vocabulary(client, tokenizer)]
            await self._check_scores(client, tokenizer, seq_len)
            self._check_temperature(client, temperature)
            if unchecked:
                log.warning("%s does not report %s: not checked", self._at(client), " or ".join(unchecked))
        return min((entry.max_model_len for entry in entries if entry and entry.max_model_len), default=None)

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        """Return the logprob of every token given those before it; 0.0 for the first. Raises `ReferenceFailed`."""
        ids = [int(token) for token in token_ids]
        try:
            return await self._served.call(lambda client: self._score(client, ids, temperature))
        except OpenAIError as error:
            raise ReferenceFailed(f"{self.name} did not score a sequence of {len(ids)} tokens: {error}") from error

    async def close(self) -> None:
        await self._served.close()

    async def _score(self, client: OpenAIClient, ids: list[int], temperature: float) -> np.ndarray:
        if temperature != 1 and client in self._ignore_temperature:
            raise OpenAIFailed(
                f"{client.address} scores at temperature 1 only, and the samples have {temperature:g}: sample at 1, or "
                "serve the model with headrace serve"
            )
        return await prompt_scores(client, self._routes.get(client, ScoreRoute.GENERATE), ids, temperature)

    def _check_length(self, client: OpenAIClient, entry: ModelEntry | None, seq_len: int) -> list[str]:
        """Return what the server does not report."""
        if entry is None or entry.max_model_len is None:
            return ["its max_model_len"]
        if entry.max_model_len < seq_len + 1:
            raise BadInput(
                f"{self._at(client)} has max_model_len = {entry.max_model_len}, and scoring needs one token more than "
                "seq_len",
                key="seq_len",
                value=seq_len,
                fix=f"Serve it with max_model_len = {seq_len + 1} or more, or lower seq_len.",
            )
        return []

    async def _check_vocabulary(self, client: OpenAIClient, tokenizer: Tokenizer) -> list[str]:
        """Return what the server does not report."""
        required = _highest_id(tokenizer) + 1
        # Only our server reports its size; `_check_scores` tries the highest id on every server.
        health = await self._request(client, "/health", _Health, _lacks_route)
        if health is not None and health.vocab_size < required:
            raise self._other_vocabulary(client, f"it has {health.vocab_size} tokens, and the policy has {required}")
        for text in (*TEXTS, tokenizer.eos_token or TEXTS[0]):
            body = {"model": self._served.model, "prompt": text, "add_special_tokens": False}
            tokenized = await self._request(
                client, "/tokenize", _Tokenized, lambda error: error.status in (404, 405, 501), body
            )
            if tokenized is None:
                return ["how it splits text (it has no /tokenize)"]
            if tokenized.tokens != (ours := tokenizer.encode(text)):
                theirs = _shorten(tokenized.tokens)
                raise self._other_vocabulary(client, f"{text!r} is {theirs} there and {_shorten(ours)} in the policy's")
        return []

    async def _request(
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
            raise BadInput(f"the vocabulary of {self._at(client)} cannot be checked: {error}") from error

    async def _check_scores(self, client: OpenAIClient, tokenizer: Tokenizer, seq_len: int) -> None:
        """Find a route, then score the highest id through it, at another temperature."""
        ids = [*tokenizer.encode(TEXTS[0]), 0, 0][: max(2, min(PROBE_TOKENS, seq_len - 1))]
        highest = _highest_id(tokenizer)
        self._ignore_temperature.discard(client)
        try:
            self._routes[client], scores = await self._find_route(client, ids)
        except OpenAIError as error:
            raise BadInput(f"{self._at(client)} does not score: {error}") from error
        try:
            tempered = await self._served.retry(lambda: self._score(client, [*ids, highest], PROBE_TEMPERATURE))
        except OpenAIError as error:
            reason = f"it does not score the policy's highest token id, {highest} ({error})"
            raise self._other_vocabulary(client, reason) from error
        if np.abs(scores - tempered[: len(ids)])[1:].mean() < MIN_TEMPERATURE_EFFECT:
            self._ignore_temperature.add(client)

    def _check_temperature(self, client: OpenAIClient, temperature: float) -> None:
        if client not in self._ignore_temperature:
            return
        if temperature != 1:
            raise BadInput(
                f"{self._at(client)} scores at temperature 1 only",
                key="sampling.temperature",
                value=temperature,
                fix="Set it to 1 for this environment, or serve the model with headrace serve.",
            )
        log.info("%s scores at temperature 1 regardless of the request", self._at(client))

    async def _find_route(self, client: OpenAIClient, ids: list[int]) -> tuple[ScoreRoute, np.ndarray]:
        errors: list[str] = []
        for route in ScoreRoute:
            try:
                return route, await self._served.retry(partial(prompt_scores, client, route, ids, 1.0))
            except OpenAIError as error:
                if not _lacks_route(error):
                    raise
                errors.append(str(error))
        raise BadInput(
            f"{self._at(client)} returns no logprobs of a prompt through any route: {'; '.join(errors)}",
            fix="Serve it with vLLM or headrace serve.",
        )

    def _other_vocabulary(self, client: OpenAIClient, reason: str) -> BadInput:
        return BadInput(
            f"{self._at(client)} has another vocabulary than the policy: {reason}",
            fix="Choose a model with the policy's tokenizer.",
        )

    def _at(self, client: OpenAIClient) -> str:
        return f"{self._served.model} at {client.address}"


def _lacks_route(error: OpenAIError) -> bool:
    """Whether the error shows that a server does not have a route, or another one of that name."""
    if isinstance(error, OpenAIRejected):
        return error.status not in (401, 403)
    return type(error) is OpenAIFailed and error.status is None


def _highest_id(tokenizer: Tokenizer) -> int:
    return max(tokenizer.backend.get_vocab().values())


def _shorten(ids: list[int]) -> str:
    return str(ids) if len(ids) <= MAX_SHOWN_IDS else f"[{', '.join(map(str, ids[:MAX_SHOWN_IDS]))}, ...]"
