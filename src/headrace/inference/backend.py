"""The interface between the HTTP server and an engine (embedded or vLLM), and checks that all engines share.

An engine works on token ids; only stop strings are text. Text, chat formats and API keys are the server's part.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from headrace.errors import BadInput
from headrace.inference.schema import MAX_LOGPROBS, SamplingParams
from headrace.rollout.version import Version

DEFAULT_MAX_MODEL_LEN = 4096
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 1e4
"""Beyond these, scaled logits overflow or become uniform. 0 is greedy."""
MAX_PENALTY = 2.0
"""Of presence and frequency, as with OpenAI."""
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 1024
MAX_STOP_TOKEN_IDS = 1024
SHUTTING_DOWN = "the engine is shutting down"
TopLogprobs = list[tuple[int, float]]
"""The most likely token ids at one position with their logprobs, highest first."""


class EngineError(Exception):
    """The engine could not finish a request."""


class InvalidRequest(BadInput, ValueError):
    """A request that can never be served; `key` is the invalid field."""


class ModelNotFound(ValueError):
    """A request names a model or an adapter that is not served."""


class RequestCancelled(EngineError):
    """The caller cancelled the request."""


class EngineStopped(EngineError):
    """The engine is shutting down or has died."""


class AdminTimeout(EngineError):
    """An admin call took longer than `http.admin_timeout`; what it changes is unknown."""


class EngineOverloaded(EngineError):
    """The queue is full; the same request may be accepted later."""


class TokenChunk(msgspec.Struct):
    """Consecutive sampled tokens. The lists have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None = None


class GenerationResult(msgspec.Struct):
    """The output of a finished request. Per-token lists have one entry per sampled token."""

    token_ids: list[int]
    logprobs: list[float]
    version_spans: list[tuple[Version, int, int]]
    """(version, start, end): tokens [start, end) were sampled with these weights."""
    finish_reason: str
    """`stop` (end-of-sequence, a stop token, which is the last token, or a stop string) or `length`."""
    stop_reason: int | str | None
    """The stop token or string that ended the request, if the request listed it."""
    prompt_logprobs: list[float] | None = None
    """One per prompt token; 0.0 for the first."""
    truncated_logprobs: list[float] | None = None
    """Logprobs in the distribution that top_p, top_k and min_p leave; None if they remove nothing."""
    top_logprobs: list[TopLogprobs] | None = None
    """As many per token as `SamplingParams.logprobs` requests; None if it requests none."""
    prompt_top_logprobs: list[TopLogprobs] | None = None
    """The same for `SamplingParams.prompt_logprobs`; empty for the first token."""
    cached_tokens: int = 0
    """Prompt tokens that were in the prefix cache."""
    latents: bytes | None = None
    """[tokens, hidden size] in float16, if the request thinks in latent space."""
    logprobs_mode: str | None = None
    """`PROCESSED` if penalties or structured outputs changed the distribution that the logprobs are of."""
    routed_experts: bytes | None = None
    """`routed_experts` of `GenerateChoice`, if they were requested."""


class EngineState(msgspec.Struct):
    """A snapshot of an engine. Counters are totals since its start."""

    version: Version
    running: int
    waiting: int
    paused: bool
    capacity: int
    """Requests that can run at once; more wait in the queue."""
    kv_usage: float
    """Fraction of the KV cache that running requests occupy, 0 to 1."""
    tokens_sampled: int = 0
    tokens_computed: int = 0
    """Prompt tokens that went through the model, recomputed ones included."""
    tokens_cached: int = 0
    """Prompt tokens that were in the prefix cache."""
    preemptions: int = 0
    """Requests that were preempted for lack of KV cache and recomputed later."""
    finished: dict[str, int] = {}
    """Requests by how they ended: stop, length, cancelled, error."""
    adapters: list[str] = []
    """Names of the loaded adapters."""
    failure: str | None = None
    """The reason if the engine is dead."""
    max_requests: int | None = None
    """Limit on running plus waiting requests; None: unlimited."""
    waits_for_trainer: bool = False
    """Whether the engine waits while the trainer holds the device lock."""
    hand_overs: int = 0
    """How often the engine released the device to the trainer."""
    cache_releases: int = 0
    """How often it also freed its KV cache, because memory was short."""
    steps: int = 0
    """Forwards of the embedded engine, each of which samples one token of every running request."""
    prefill_steps: int = 0
    """Those that also computed prompt tokens."""
    device_wait_s: float = 0.0
    """Seconds for which the embedded engine waited for the results of its steps."""
    device_busy_s: float = 0.0
    """Seconds for which the GPU computed its steps."""
    tokens_drafted: int = 0
    """Tokens that the embedded engine guessed ahead, in speculative decoding."""
    tokens_accepted: int = 0
    """Those of them that were sampled, too."""


class Generation(ABC):
    """One request in progress. The caller either awaits its result or cancels it. Create it in an event loop."""

    def __init__(self) -> None:
        self._chunks: list[TokenChunk] = []
        self._has_news = asyncio.Event()
        self._ended: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()

    async def result(self) -> GenerationResult:
        """Wait for the request to finish. Raises `EngineError`."""
        return await asyncio.shield(self._ended)  # a cancelled wait does not cancel the request

    async def chunks(self) -> AsyncIterator[TokenChunk]:
        """Yield tokens as they are sampled; `result` has all of them afterwards. Raises `EngineError`.

        With stop strings a chunk may end with tokens of the stop string.
        """
        sent = 0
        while True:
            self._has_news.clear()
            has_ended = self._ended.done()
            while sent < len(self._chunks):
                sent += 1
                yield self._chunks[sent - 1]
            if has_ended:
                self._ended.result()  # raises its error
                return
            await self._has_news.wait()

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the request; does nothing if it has finished."""

    def add(self, chunk: TokenChunk) -> None:
        """Add sampled tokens of a request that is streamed."""
        self._chunks.append(chunk)
        self._has_news.set()

    def end(self, outcome: GenerationResult | Exception) -> None:
        """End the request with its result or its error."""
        if isinstance(outcome, Exception):
            self._ended.set_exception(outcome)
            self._ended.exception()  # marks it as retrieved: the caller may be gone
        else:
            self._ended.set_result(outcome)
        self._has_news.set()


class Backend(Protocol):
    """An engine behind the server. Used from the server's event loop only."""

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
        """Add a request to the queue, at its front if `urgent`.

        Requests with different salts share no cache; requests of a session go to the same replica. Raises
        `InvalidRequest`, `EngineOverloaded` and `EngineStopped`.
        """

    def state(self) -> EngineState: ...

    async def pause(self) -> None:
        """Suspend all requests. Returns once no step is running."""

    async def resume(self) -> None: ...

    async def update_weights(self, directory: Path, version: Version) -> str:
        """Load a published version, a whole model or an adapter, and return its checksum.

        Requests in flight continue with the new weights; where adapter versions are kept side by side, they finish
        with the old one. Raises `WeightsError`, and the weights are then unchanged.
        """

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Load a LoRA adapter for requests that name it. Raises `WeightsError`."""

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests in flight keep it. Raises `ModelNotFound`."""

    async def failure(self) -> str:
        """Wait until the engine is dead and return the reason. `submit` raises `EngineStopped` from then on."""

    async def close(self) -> None:
        """Shut down; requests in flight end with `EngineStopped`."""


def resolve_max_model_len(positions: int | None, configured: int | None) -> int:
    """Return the longest prompt plus completion in tokens: `configured`, or the model's `positions` up to 4096."""
    if configured is None:
        return min(positions or DEFAULT_MAX_MODEL_LEN, DEFAULT_MAX_MODEL_LEN)
    if positions is not None and configured > positions:
        fact = f"the model's max_position_embeddings is {positions}"
        fix = f"Lower it to {positions} or less; where a run does not set it, it follows from seq_len."
        raise BadInput(fact, key="inference.max_model_len", value=configured, fix=fix)
    return configured


def check_request(token_ids: Sequence[int], params: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    """Raise `InvalidRequest` if no engine can serve the request."""
    check_prompt(token_ids, vocab_size, max_model_len)
    if params.temperature != 0 and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
        _refuse(params, "temperature", f"must be 0, or between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}")
    if not 0 < params.top_p <= 1:
        _refuse(params, "top_p", "must be in (0, 1]")
    if not -1 <= params.top_k < 1 << 31:
        _refuse(params, "top_k", "must be positive, or -1 to disable it")
    if not 0 <= params.min_p <= 1:
        _refuse(params, "min_p", "must be in [0, 1]")
    for key in ("presence_penalty", "frequency_penalty"):
        if not -MAX_PENALTY <= getattr(params, key) <= MAX_PENALTY:
            _refuse(params, key, f"must be between {-MAX_PENALTY:g} and {MAX_PENALTY:g}")
    if not 0 < params.repetition_penalty < math.inf:
        _refuse(params, "repetition_penalty", "must be a positive number")
    if params.max_tokens is not None and params.max_tokens < 1:
        _refuse(params, "max_tokens", "must be at least 1")
    if len(params.stop) > MAX_STOP_STRINGS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in params.stop):
        _refuse(params, "stop", f"must be at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARS} characters")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS or min(params.stop_token_ids, default=0) < 0:
        _refuse(params, "stop_token_ids", f"must be at most {MAX_STOP_TOKEN_IDS} non-negative ids")
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        _refuse(params, "seed", "must fit in 64 bits for each of the n choices, whose seeds are consecutive")
    if params.latents is not None:
        if not 0 < len(params.latents.until) <= MAX_STOP_CHARS:
            _refuse(params, "latents", f"until must be a string of 1 to {MAX_STOP_CHARS} characters")
        if not (MIN_TEMPERATURE <= params.latents.tau <= MAX_TEMPERATURE and 0 < params.latents.noise < math.inf):
            _refuse(params, "latents", "tau and noise must be positive")
        if params.logprobs_mode is not None:
            fact = "not supported together with penalties or structured outputs, which change the distribution"
            raise InvalidRequest(fact, key="latents")
    for key in ("logprobs", "prompt_logprobs"):
        if not 0 <= (getattr(params, key) or 0) <= MAX_LOGPROBS:
            _refuse(params, key, f"must be between 0 and {MAX_LOGPROBS}")


def _refuse(params: SamplingParams, key: str, fact: str) -> NoReturn:
    raise InvalidRequest(fact, key=key, value=getattr(params, key))


def check_prompt(token_ids: Sequence[int], vocab_size: int, max_model_len: int, key: str = "token_ids") -> None:
    """Raise `InvalidRequest` for a prompt that is empty, too long or outside the vocabulary."""
    if not token_ids:
        raise InvalidRequest("empty: a prompt needs at least one token", key=key)
    if len(token_ids) >= max_model_len:
        raise InvalidRequest(
            f"{len(token_ids)} tokens leave no space for a completion: prompt plus completion are limited to "
            f"max_model_len = {max_model_len}",
            key=key,
        )
    check_token_ids(token_ids, vocab_size, key)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, key: str) -> None:
    """Raise `InvalidRequest` for ids outside the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequest(f"contains {bad}, which is outside the vocabulary of {vocab_size}", key=key)
