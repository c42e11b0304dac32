"""A model behind one or more servers with OpenAI's API that Headrace neither starts nor stops.

Requests go to the least busy address. A request that failed for a temporary reason is retried for a bounded time, on
another address if there is one; a timeout is retried on another address only.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from headrace.errors import BadInput
from headrace.inference.client.openai_client import (
    ModelEntry,
    OpenAIClient,
    OpenAIError,
    OpenAITimeout,
    OpenAIUnreachable,
    backoff_delays,
    retry,
)
from headrace.inference.schema import StructuredOutputs

log = logging.getLogger(__name__)

T = TypeVar("T")

COOLDOWN_S = 2.0
"""Seconds for which an address that failed is tried last; after a timeout, at least as long as that timeout."""
MAX_CONCURRENT = 4096
"""Requests to one address; callers have their own limits."""
HELLO = [{"role": "user", "content": "Hello"}]


class ServedModel:
    """The model `name` at the addresses `base_url`, each like http://host:port/v1.

    `timeout` is in seconds for one request, `retry_for` for all retries after a failure.
    """

    def __init__(
        self,
        name: str,
        base_url: Sequence[str],
        *,
        api_key_var: str | None = None,
        timeout: float = 120.0,
        retry_for: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not base_url:
            fix = "Write where it is served: http://HOST:PORT/v1."
            raise BadInput(f"model {name} has no address", key="base_url", fix=fix)
        self.clients = [OpenAIClient(url, name, api_key_var, timeout, headers, MAX_CONCURRENT) for url in base_url]
        self.model = name
        self.name = f"{name} at {', '.join(client.address for client in self.clients)}"
        """The model and its addresses, for messages."""
        self._timeout = timeout
        self._retry_for = retry_for
        self._in_flight: Counter[OpenAIClient] = Counter()
        self._cooling_until: dict[OpenAIClient, float] = {}

    async def call(self, request: Callable[[OpenAIClient], Awaitable[T]]) -> T:
        """Make a request of one of the servers. Raises `OpenAIError`."""

        async def attempt() -> T:
            client = min(self.clients, key=lambda client: (self._is_cooling(client), self._in_flight[client]))
            self._in_flight[client] += 1
            try:
                return await request(client)
            except OpenAIError as error:
                if error.transient:
                    cooldown = max(COOLDOWN_S, self._timeout if isinstance(error, OpenAITimeout) else 0.0)
                    self._cooling_until[client] = time.monotonic() + cooldown
                raise
            finally:
                self._in_flight[client] -= 1

        def retryable(error: OpenAIError) -> bool:
            return _is_temporary(error) or (
                isinstance(error, OpenAITimeout) and not all(map(self._is_cooling, self.clients))
            )

        return await retry(attempt, backoff_delays(self._retry_for), retryable)

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat an attempt for up to `retry_for` seconds while it fails for a temporary reason."""
        return await retry(attempt, backoff_delays(self._retry_for), _is_temporary)

    async def check(self) -> list[ModelEntry | None]:
        """Return each server's entry of the model, None if it has no `/models`. Raises `BadInput` if it is missing."""
        return [await self._find_model(client) for client in self.clients]

    async def check_chat(self, sampling: Mapping[str, Any], seq_len: int) -> None:
        """Raise `BadInput` unless every server has the model and replies to a chat with these sampling parameters."""
        for client, entry in zip(self.clients, await self.check(), strict=True):
            try:
                await self.retry(partial(client.chat, HELLO, max_tokens=1, extra=sampling))
            except OpenAIError as error:
                keys = ", ".join(f"{key} = {value}" for key, value in sampling.items())
                raise BadInput(f"{self.model} at {client.address} failed a chat with {keys}: {error}") from error
            if entry is not None and entry.max_model_len is not None and entry.max_model_len < seq_len:
                log.warning(
                    "%s at %s has max_model_len = %d, less than seq_len = %d: longer conversations are lost",
                    *(self.model, client.address, entry.max_model_len, seq_len),
                )

    async def close(self) -> None:
        for client in self.clients:
            await client.close()

    async def _find_model(self, client: OpenAIClient) -> ModelEntry | None:
        """Return the entry of the model; None if the server has no `/models`. Raises `BadInput` if it is missing."""
        try:
            entries = await self._list_models(client)
        except OpenAIError as error:
            if error.status in (404, 405):
                return None
            fact = f"model {self.model} cannot be used: {error}"
            fix = "Start its server, or correct base_url." if isinstance(error, OpenAIUnreachable) else None
            raise BadInput(fact, key="base_url", value=client.address, fix=fix) from error
        for entry in entries:
            # Our server also accepts the directory, and the last part of a name.
            others = (entry.root, entry.id.rsplit("/", 1)[-1]) if entry.owned_by == "headrace" else ()
            if self.model in (entry.id, *others):
                return entry
        names = ", ".join(entry.id for entry in entries) or "none"
        fact = f"the server does not serve {self.model!r}; its models: {names}"
        fix = "Name one of its models, or correct base_url."
        raise BadInput(fact, key="base_url", value=client.address, fix=fix)

    async def _list_models(self, client: OpenAIClient) -> list[ModelEntry]:
        """Return the models of a server; waits, with a warning, for one that is not available yet."""
        try:
            return await client.models()
        except OpenAIError as error:
            if not _is_temporary(error):
                raise
            log.warning("model %s is not available yet: %s; retrying for %g s", self.model, error, self._retry_for)
        return await self.retry(client.models)

    def _is_cooling(self, client: OpenAIClient) -> bool:
        return self._cooling_until.get(client, 0.0) > time.monotonic()


def sampling_keys(temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0) -> dict[str, Any]:
    """Return sampling parameters as fields of a request, without neutral ones, which a server may not support."""
    keys: dict[str, Any] = {"temperature": temperature}
    keys |= {"top_p": top_p} if top_p < 1 else {}
    keys |= {"top_k": top_k} if top_k != -1 else {}
    return keys | ({"min_p": min_p} if min_p > 0 else {})


def structured_keys(outputs: StructuredOutputs | None) -> dict[str, Any]:
    """Return what a reply must match as fields of a request: OpenAI's where it has them, else vLLM's and ours."""
    if outputs is None:
        return {}
    if outputs.json_object:
        return {"response_format": {"type": "json_object"}}
    if isinstance(outputs.json, dict):
        form = {"name": "reply", "schema": outputs.json}
        return {"response_format": {"type": "json_schema", "json_schema": form}}
    return {"structured_outputs": msgspec.to_builtins(outputs)}


def _is_temporary(error: OpenAIError) -> bool:
    """Whether the same server may succeed soon: not after a timeout, nor after an invalid response."""
    return isinstance(error, OpenAIUnreachable) or (
        error.transient and error.status is not None and not isinstance(error, OpenAITimeout)
    )
