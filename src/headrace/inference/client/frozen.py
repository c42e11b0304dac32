"""A frozen model that scores sequences: how likely does a teacher find what the policy wrote?

It is asked with the policy's own token ids, so it must have the policy's vocabulary: `check` sees to that before a run
begins. What a server does not say is not guessed, but told in the log.
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
from headrace.inference.client.prompt_scores import Door, prompt_scores
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
"""What two tokenizers must split alike."""
PROBED = 16
"""Tokens of the first text that are scored to find a door."""
OTHER_TEMPERATURE = 2.0
LIKENESS = 0.03
"""How far apart a token's scores at two temperatures are, on average, if the server pays no heed to that."""
SHOWN = 8
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
        self._doors: dict[OpenAIClient, Door] = {}
        self._untempered: set[OpenAIClient] = set()
        """Those that score at temperature 1, whatever they are asked; vLLM does."""

    async def check(self, tokenizer: Tokenizer, seq_len: int, temperature: float = 1.0) -> int | None:
        """Whether every server has the model, its scores, the policy's vocabulary, and room for `seq_len` tokens.

        Gives the least `max_model_len` that a server says it has.
        """
        entries = await self._served.check()
        for client, entry in zip(self._served.clients, entries, strict=True):
            unsaid = [*self._check_room(client, entry, seq_len), *await self._check_vocabulary(client, tokenizer)]
            await self._check_scores(client, tokenizer, seq_len)
            self._check_temperature(client, temperature)
            if unsaid:
                log.warning("%s does not say %s: that is not checked", self._at(client), ", nor ".join(unsaid))
        return min((entry.max_model_len for entry in entries if entry and entry.max_model_len), default=None)

    async def score(self, token_ids: Sequence[int], temperature: float) -> np.ndarray:
        """The logprob of every token after those before it; 0.0 for the first. Raises `ReferenceFailed`."""
        ids = [int(token) for token in token_ids]
        try:
            return await self._served.ask(lambda client: self._score(client, ids, temperature))
        except OpenAIError as error:
            raise ReferenceFailed(f"{self.name} did not score a sequence of {len(ids)} tokens: {error}") from error

    async def close(self) -> None:
        """Close its connections; whoever serves it goes on."""
        await self._served.close()

    async def _score(self, client: OpenAIClient, ids: list[int], temperature: float) -> np.ndarray:
        if temperature != 1 and client in self._untempered:
            raise OpenAIFailed(
                f"{client.address} scores at temperature 1 alone, and this was sampled at {temperature:g}: sample at "
                "1, or serve the model with headrace serve"
            )
        return await prompt_scores(client, self._doors.get(client, Door.GENERATE), ids, temperature)

    def _check_room(self, client: OpenAIClient, entry: ModelEntry | None, seq_len: int) -> list[str]:
        """What it does not say."""
        if entry is None or entry.max_model_len is None:
            return ["how long a sequence may be"]
        if entry.max_model_len < seq_len + 1:
            raise BadInput(
                f"{self._at(client)} takes at most {entry.max_model_len} tokens, but seq_len is {seq_len} and scoring "
                f"takes one more: serve it with max_model_len = {seq_len + 1} or more, or lower seq_len"
            )
        return []

    async def _check_vocabulary(self, client: OpenAIClient, tokenizer: Tokenizer) -> list[str]:
        """What it does not say."""
        least = _highest_id(tokenizer) + 1
        # Only our own tells its size; whether the highest id has a score is seen in any case.
        health = await self._told(client, "/health", _Health, _is_shut)
        if health is not None and health.vocab_size < least:
            raise self._stranger(client, f"it has {health.vocab_size} tokens, and the policy has {least}")
        for text in (*TEXTS, tokenizer.eos_token or TEXTS[0]):
            body = {"model": self._served.model, "prompt": text, "add_special_tokens": False}
            tokenized = await self._told(client, "/tokenize", _Tokenized, _is_missing, body)
            if tokenized is None:
                return ["how it splits text (it has no /tokenize)"]
            theirs = tokenized.tokens
            if theirs != (ours := tokenizer.encode(text)):
                raise self._stranger(client, f"{text!r} is {_begun(theirs)} there, and {_begun(ours)} to the policy")
        return []

    async def _told(
        self,
        client: OpenAIClient,
        route: str,
        kind: type[T],
        says_nothing: Callable[[OpenAIError], bool],
        body: Mapping[str, Any] | None = None,
    ) -> T | None:
        """What a server tells there, asked until what may pass has passed; None where it has nothing to tell."""
        try:
            return await self._served.insist(lambda: client.ask(route, kind, body, at_root=True))
        except OpenAIError as error:
            if says_nothing(error):
                return None
            raise BadInput(f"{self._at(client)} cannot be asked for its vocabulary: {error}") from error

    async def _check_scores(self, client: OpenAIClient, tokenizer: Tokenizer, seq_len: int) -> None:
        """Find the door, then ask through it for the highest id, at another temperature."""
        ids = [*tokenizer.encode(TEXTS[0]), 0, 0][: max(2, min(PROBED, seq_len - 1))]
        highest = _highest_id(tokenizer)
        self._untempered.discard(client)
        try:
            self._doors[client], scores = await self._find_door(client, ids)
        except OpenAIError as error:
            raise BadInput(f"{self._at(client)} cannot be asked for scores: {error}") from error
        try:
            tempered = await self._served.insist(lambda: self._score(client, [*ids, highest], OTHER_TEMPERATURE))
        except OpenAIError as error:
            why = f"it does not score the policy's highest token id, {highest} ({error})"
            raise self._stranger(client, why) from error
        if np.abs(scores - tempered[: len(ids)])[1:].mean() < LIKENESS:
            self._untempered.add(client)

    def _check_temperature(self, client: OpenAIClient, temperature: float) -> None:
        if client not in self._untempered:
            return
        if temperature != 1:
            raise BadInput(
                f"{self._at(client)} scores at temperature 1, whatever it is asked, and the environment samples at "
                f"{temperature:g}: set its sampling.temperature to 1, or serve the model with headrace serve"
            )
        log.info("%s scores at temperature 1, whatever it is asked", self._at(client))

    async def _find_door(self, client: OpenAIClient, ids: list[int]) -> tuple[Door, np.ndarray]:
        tried: list[str] = []
        for door in Door:
            try:
                return door, await self._served.insist(partial(prompt_scores, client, door, ids, 1.0))
            except OpenAIError as error:
                if not _is_shut(error):
                    raise
                tried.append(str(error))
        raise BadInput(
            f"{self._at(client)} gives no logprobs of a prompt: serve it with vLLM or headrace serve. All doors were "
            f"tried: {'; '.join(tried)}"
        )

    def _stranger(self, client: OpenAIClient, why: str) -> BadInput:
        return BadInput(
            f"{self._at(client)} has another vocabulary than the policy: {why}. What scores the policy's tokens must "
            "have its tokenizer"
        )

    def _at(self, client: OpenAIClient) -> str:
        return f"{self._served.model} at {client.address}"


def _is_missing(error: OpenAIError) -> bool:
    """Whether a server says that it has no such route."""
    return error.status in (404, 405, 501)


def _is_shut(error: OpenAIError) -> bool:
    """Whether a server does not have this door: it knows nothing of it, or answers something else there."""
    if isinstance(error, OpenAIRejected):
        return error.status not in (401, 403)
    return type(error) is OpenAIFailed and error.status is None


def _highest_id(tokenizer: Tokenizer) -> int:
    return max(tokenizer.backend.get_vocab().values())


def _begun(ids: list[int]) -> str:
    return str(ids) if len(ids) <= SHOWN else f"[{', '.join(map(str, ids[:SHOWN]))}, ...]"
