"""A model that somebody serves, at one or more addresses that speak OpenAI's interface.

The least busy address is asked first. What failed for a passing reason is asked again for a bounded time, of another
address where there is one; what took too long is asked of another address alone. The server is never ours to start or
to stop.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from headrace.errors import BadInput
from headrace.inference.client.openai_client import (
    ModelEntry,
    OpenAIClient,
    OpenAIError,
    OpenAITimeout,
    OpenAIUnreachable,
    again,
    growing_pauses,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

REST = 2.0
"""Seconds for which an address that failed comes last; one that did not answer in time does for as long again."""
MOST_AT_ONCE = 4096
"""Requests to one address: whoever asks has a limit of its own."""
HELLO = [{"role": "user", "content": "Hello"}]


class ServedModel:
    """`name` is what its servers call it, `base_url` where they are: http://host:port/v1, and so on.

    `timeout` is in seconds for one request, `retry_for` for all the tries after one that failed.
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
            raise BadInput(f"model {name} has no base_url: write where it is served, as http://HOST:PORT/v1")
        self.clients = [OpenAIClient(url, name, api_key_var, timeout, headers, MOST_AT_ONCE) for url in base_url]
        self.model = name
        self.name = f"{name} at {', '.join(client.address for client in self.clients)}"
        """For people."""
        self._timeout = timeout
        self._retry_for = retry_for
        self._under_way: Counter[OpenAIClient] = Counter()
        self._resting: dict[OpenAIClient, float] = {}

    async def ask(self, call: Callable[[OpenAIClient], Awaitable[T]]) -> T:
        """What one of the servers answers. Raises `OpenAIError`."""

        async def attempt() -> T:
            client = min(self.clients, key=lambda client: (self._is_resting(client), self._under_way[client]))
            self._under_way[client] += 1
            try:
                return await call(client)
            except OpenAIError as error:
                if error.transient:
                    rest = max(REST, self._timeout if isinstance(error, OpenAITimeout) else 0.0)
                    self._resting[client] = time.monotonic() + rest
                raise
            finally:
                self._under_way[client] -= 1

        def worth(error: OpenAIError) -> bool:
            return _may_pass(error) or (
                isinstance(error, OpenAITimeout) and not all(map(self._is_resting, self.clients))
            )

        return await again(attempt, growing_pauses(self._retry_for), worth)

    async def insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try for as long as this model is worth it."""
        return await again(attempt, growing_pauses(self._retry_for), _may_pass)

    async def check(self) -> list[ModelEntry | None]:
        """What each server says of the model, None where it has no list of models; `BadInput` if it is not there."""
        return [await self._check(client) for client in self.clients]

    async def check_chat(self, sampling: Mapping[str, Any], seq_len: int) -> None:
        """Whether every server has the model and answers a word in a chat that is sampled so; `BadInput` if not."""
        for client, entry in zip(self.clients, await self.check(), strict=True):
            try:
                await self.insist(partial(client.chat, HELLO, max_tokens=1, extra=sampling))
            except OpenAIError as error:
                raise BadInput(
                    f"{self.model} at {client.address} does not answer a chat with {_listed(sampling)}: {error}"
                ) from error
            if entry is not None and entry.max_model_len is not None and entry.max_model_len < seq_len:
                log.warning(
                    "%s at %s takes at most %d tokens, but seq_len is %d: longer conversations are lost",
                    *(self.model, client.address, entry.max_model_len, seq_len),
                )

    async def close(self) -> None:
        """Close the connections."""
        for client in self.clients:
            await client.close()

    async def _check(self, client: OpenAIClient) -> ModelEntry | None:
        try:
            entries = await self._list(client)
        except OpenAIError as error:
            if error.status in (404, 405):
                return None
            advice = ". Start its server, or mend base_url" if isinstance(error, OpenAIUnreachable) else ""
            raise BadInput(f"model {self.model} cannot be used: {error}{advice}") from error
        served = [entry for entry in entries if self._is_named(entry)]
        if not served:
            others = ", ".join(entry.id for entry in entries) or "none"
            raise BadInput(
                f"{client.address} does not serve {self.model!r}; its models are {others}: name one of these, or mend "
                "base_url"
            )
        return served[0]

    async def _list(self, client: OpenAIClient) -> list[ModelEntry]:
        try:
            return await client.model_entries()
        except OpenAIError as error:
            if not _may_pass(error):
                raise
            log.warning("model %s is not there yet: %s; trying for %g s", self.model, error, self._retry_for)
        return await self.insist(client.model_entries)

    def _is_named(self, entry: ModelEntry) -> bool:
        """Our own server also takes the last part of a directory's name."""
        ours = entry.owned_by == "headrace" and entry.id.rstrip("/").rsplit("/", 1)[-1] == self.model
        return ours or entry.id == self.model

    def _is_resting(self, client: OpenAIClient) -> bool:
        return self._resting.get(client, 0.0) > time.monotonic()


def sampling_keys(temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0) -> dict[str, Any]:
    """How to sample, as a request says it: what would change nothing is left to the server, which may not know it."""
    keys: dict[str, Any] = {"temperature": temperature}
    keys |= {"top_p": top_p} if top_p < 1 else {}
    keys |= {"top_k": top_k} if top_k != -1 else {}
    return keys | ({"min_p": min_p} if min_p > 0 else {})


def _may_pass(error: OpenAIError) -> bool:
    """A server that took all the time there was would take it again, and what it answers amiss it means."""
    return isinstance(error, OpenAIUnreachable) or (
        error.transient and error.status is not None and not isinstance(error, OpenAITimeout)
    )


def _listed(sampling: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in sampling.items())
