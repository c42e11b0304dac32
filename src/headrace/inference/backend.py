"""What the server asks of an engine: sample after token ids, score them, and take new weights while it samples.

The contract between the HTTP server and the engines behind it: the embedded one and vLLM. It knows neither HTTP nor
torch. Text, chat formats and keys are the server's business; an engine sees token ids alone, but for stop strings.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.inference.schema import SamplingParams
from headrace.rollout.version import Version

Alternatives = list[tuple[int, float]]
"""The most likely tokens at one place with their logprobs, the likeliest first."""


class EngineError(Exception):
    """The engine could not finish a request."""


class InvalidRequest(ValueError):
    """A request that can never be served. The message names the field at fault."""


class NotServed(ValueError):
    """What was asked for does not exist here."""


class RequestCancelled(EngineError):
    """Whoever asked no longer wants the answer."""


class EngineStopped(EngineError):
    """The engine is shutting down, or has died."""


class EngineOverloaded(EngineError):
    """As many requests wait as may; the same request may be served later."""


class Piece(msgspec.Struct):
    """Tokens that were sampled one after the other. The lists have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[Alternatives] | None = None


class Result(msgspec.Struct):
    """What a request produced. Per-token lists have one entry per sampled token."""

    token_ids: list[int]
    logprobs: list[float]
    version_spans: list[tuple[Version, int, int]]
    """(version, start, end): these weights sampled the tokens [start, end)."""
    finish_reason: str
    """`stop` (end-of-sequence, a stop token, which is the last token, or a stop string) or `length`."""
    stop_reason: int | str | None
    """The stop token or string, if the request named it."""
    prompt_logprobs: list[float] | None = None
    """One per prompt token, the first 0.0: nothing predicts it."""
    truncated_logprobs: list[float] | None = None
    """Among what top_p, top_k and min_p left to choose from; None unless they take anything away."""
    top_logprobs: list[Alternatives] | None = None
    """As many per token as `logprobs` asked for; None if it asked for none."""
    prompt_top_logprobs: list[Alternatives] | None = None
    """The same for `prompt_logprobs`, the first empty."""
    cached_tokens: int = 0
    """Of the prompt, how many were found in the prefix cache."""


class EngineState(msgspec.Struct):
    """How an engine is at the moment. Counts are since its start."""

    version: Version
    running: int
    waiting: int
    paused: bool
    capacity: int
    """Requests that it runs at once; more wait in line."""
    kv_usage: float
    """The share of the KV cache that running requests hold, 0 to 1."""
    tokens_sampled: int = 0
    tokens_computed: int = 0
    """Prompt tokens that went through the model, those computed again included."""
    tokens_cached: int = 0
    """Prompt tokens that the prefix cache had."""
    preemptions: int = 0
    """Requests that lost their place in the KV cache, and were computed again later."""
    finished: dict[str, int] = {}
    """Requests by how they ended: stop, length, cancelled, error."""
    adapters: list[str] = []
    """The adapters that can be asked for by name."""
    failure: str | None = None
    """Why it is dead, if it is."""
    most: int | None = None
    """Requests that it takes in at once, running and in line; None for any number."""
    stands_still: bool = False
    """Whether the engine waits while the trainer holds the device lock."""
    hand_overs: int = 0
    """How often it gave way to the trainer."""
    cache_releases: int = 0
    """How often it gave up its KV cache for that, since memory was short."""


class Generation(Protocol):
    """One request under way. Whoever submitted it either sees it through to its result or cancels it."""

    async def result(self) -> Result:
        """All of it. Raises `EngineError`."""
        ...

    def pieces(self) -> AsyncIterator[Piece]:
        """What is sampled, as it comes; `result` has all of it afterwards. Raises `EngineError`.

        With stop strings a piece may end with tokens of the string itself.
        """
        ...

    def cancel(self) -> None:
        """Give it up. Does nothing to a request that has ended."""
        ...


class Backend(Protocol):
    """An engine behind the server, used from the server's event loop alone."""

    name: str
    """`embedded` or `vllm`."""
    max_model_len: int
    vocab_size: int

    def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        urgent: bool = False,
        adapter: str | None = None,
        session: str | None = None,
    ) -> Generation:
        """Put a request in line, an urgent one in front.

        Raises `InvalidRequest` for one that can never be served, `EngineOverloaded` and `EngineStopped`. Requests with
        different salts share no cache; a session's requests go where its earlier ones went.
        """
        ...

    def state(self) -> EngineState: ...

    async def pause(self) -> None:
        """Hold all requests where they are. Returns once they stand still."""
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, directory: Path, version: Version) -> str:
        """Go on with a published version, a whole model or an adapter of it; returns its checksum.

        Requests in flight go on with it, but where versions of an adapter are kept side by side they end with the one
        that they began with. Raises `WeightsError`, and the weights are then as they were.
        """
        ...

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Serve a LoRA adapter beside the model, for requests that name it. Raises `WeightsError`."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Requests in flight keep it to their end. Raises `NotServed`."""
        ...

    async def failure(self) -> str:
        """Wait until the engine is beyond help; returns why. `submit` raises `EngineStopped` from then on."""
        ...

    async def close(self) -> None:
        """End it; requests in flight get `EngineStopped`."""
        ...
