"""Request bodies: read within limits of size, time and memory, then decoded; and the fields that several routes share.

A large body holds one of a few places until it has been processed. A sender that stalls keeps its place only while no
other body needs it. Left out: logit biases. They are rejected, like every field that would change the reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from headrace.inference.backend import GenerationResult, InvalidRequest
from headrace.inference.schema import LatentParams, PromptTokensDetails, SamplingParams, StructuredOutputs, Usage

T = TypeVar("T")

MAX_LISTED_FIELDS = 8
"""An unknown field of a body with at most so many fields is reported with their names."""
LARGE_BODY_BYTES = 1 << 20
MAX_LARGE_BODIES = 8
"""Large bodies that are read at the same time; more wait in the network."""
BODY_TIMEOUT_S = 60.0
"""For a whole body; for a large one from the moment that it has a place."""
MIN_BYTES_PER_S = 1 << 20
"""A large body that arrives more slowly gives up its place if another one needs it."""
SLOW_GRACE_S = 1.0
"""How long it may fall behind that rate."""
SLOW_POLL_S = 0.25


class ClientGone(Exception):
    """The client disconnected before its reply was ready."""


class TooLarge(ValueError):
    """The body exceeds `max_body_mb`."""


class TooSlow(ValueError):
    """The body did not arrive in time."""


class LargeBodies:
    """The places of large bodies. While another body waits, one that arrives too slowly loses its place."""

    def __init__(self, places: int = MAX_LARGE_BODIES) -> None:
        self._places = asyncio.Semaphore(places)
        self._slow_at: dict[asyncio.Timeout, float] = {}
        """When a body that is still arriving counts as slow, by its timeout, in the event loop's time."""

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place and hold it in the block."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SLOW_POLL_S):
                    await self._places.acquire()
                    break
            now = asyncio.get_running_loop().time()
            for timeout in [timeout for timeout, slow_at in self._slow_at.items() if slow_at < now]:
                self.end(timeout)
                timeout.reschedule(now)
        try:
            yield
        finally:
            self._places.release()

    def progress(self, timeout: asyncio.Timeout, size: int) -> None:
        """Record that `size` more bytes of a body have arrived, whose reading `timeout` limits."""
        now = asyncio.get_running_loop().time()
        slow_at = max(self._slow_at.get(timeout, now + SLOW_GRACE_S), now) + size / MIN_BYTES_PER_S
        self._slow_at[timeout] = min(slow_at, now + SLOW_GRACE_S)

    def end(self, timeout: asyncio.Timeout) -> None:
        """Forget a body that has arrived or failed."""
        self._slow_at.pop(timeout, None)


@contextlib.asynccontextmanager
async def read_body(
    http: HttpRequest, max_bytes: int, large: LargeBodies, timeout_s: float = BODY_TIMEOUT_S
) -> AsyncIterator[bytearray]:
    """Read a request's body of at most `max_bytes` within `timeout_s`.

    Large bodies hold their place until the caller has processed them, to limit memory.
    """
    too_large = TooLarge(f"the body is larger than {max_bytes / 2**20:g} MB (max_body_mb)")
    stated = http.headers.get("content-length", "")
    if stated.isdecimal() and int(stated) > max_bytes:
        raise too_large
    content = bytearray()
    async with contextlib.AsyncExitStack() as place:
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                async for chunk in http.stream():
                    if len(content) + len(chunk) > max_bytes:
                        raise too_large
                    if len(content) <= LARGE_BODY_BYTES < len(content) + len(chunk):
                        timeout.reschedule(None)
                        await place.enter_async_context(large.place())
                        timeout.reschedule(asyncio.get_running_loop().time() + timeout_s)
                    content += chunk
                    if len(content) > LARGE_BODY_BYTES:
                        large.progress(timeout, len(chunk))
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            raise TooSlow(
                f"only {len(content)} bytes of the body arrived within {timeout_s:g} s (http.body_timeout), or others "
                "waited for its place. Retry."
            ) from None
        finally:
            large.end(timeout)
        yield content


def exceeds_json_limits(content: bytes | bytearray, max_list: int, max_others: int) -> bool:
    """Whether JSON has more than `max_others` strings, keys, lists and objects, or certainly a list over `max_list`.

    Decoding millions of values blocks all threads for seconds; counting takes a hundredth of that and releases the
    GIL. Values after a list, up to the next one, count as part of it, with a tolerance of `max_others`.
    """
    bare = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left delimits a string
    strings = bare.count(b'"') // 2
    if strings > max_others:
        return True
    outside = b"".join(bare.split(b'"')[::2])
    if strings + outside.count(b"[") + outside.count(b"{") > max_others:
        return True
    return any(part.count(b",") > max_list + max_others for part in outside.split(b"["))


def decode_body(content: bytes | bytearray, kind: type[T]) -> T:
    """Decode JSON as a struct. Raises `InvalidRequest`, which names the path of the invalid field."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("Object contains unknown field", "unknown field").replace("$.", "")
        fields = getattr(kind, "__struct_fields__", ())
        if "unknown field" in text and " - at " not in text and len(fields) <= MAX_LISTED_FIELDS:
            text = f"{text}; the fields are: {', '.join(fields) or 'none'}"
        raise InvalidRequest(text) from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


MAX_CHOICES = 128
"""Upper limit of `n`."""
Unsupported = Annotated[Any, "unsupported"]
"""The type of fields that are not supported: any value but the default and null is rejected."""


class SamplingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of every route; null is the same as omitting the field."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    structured_outputs: StructuredOutputs | None = None
    latents: LatentParams | None = None
    """Not a field of vLLM's or OpenAI's: think in latent space. Only `/inference/v1/generate` returns the latents."""
    routed_experts: bool | None = None
    """Not a field of vLLM's or OpenAI's: return the experts of each token. Only `/inference/v1/generate` does."""
    spaces_between_special_tokens: Any = None
    logit_bias: Unsupported = {}
    min_tokens: Unsupported = 0
    bad_words: Unsupported = []
    allowed_token_ids: Unsupported = None
    include_stop_str_in_output: Unsupported = False
    skip_special_tokens: Unsupported = True
    truncate_prompt_tokens: Unsupported = None
    logits_processors: Unsupported = []
    detokenize: Unsupported = True

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def engine_params(self, **params: Any) -> SamplingParams:
        """Return the engine's parameters, with `params` instead of these fields. Engines check the values."""
        refuse_unsupported(self)
        fields = {name: getattr(self, name, None) for name in SamplingParams.__struct_fields__}
        fields = {name: value for name, value in fields.items() if value is not None}
        return SamplingParams(**{**fields, "stop": self.stops, **params})


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Any = None
    continuous_usage_stats: Unsupported = False


class JsonSchema(msgspec.Struct):
    """OpenAI's form. The schema is enforced whether it is `strict` or not."""

    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def structured_outputs(self) -> StructuredOutputs | None:
        if self.type != "json_schema":
            return StructuredOutputs(json_object=True) if self.type == "json_object" else None
        if self.json_schema is None or self.json_schema.schema is None:
            raise InvalidRequest("missing", key="response_format.json_schema.schema")
        return StructuredOutputs(json=self.json_schema.schema)


class OpenAIRequest(SamplingRequest, kw_only=True):
    """Fields that chat and text completions share."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """vLLM's: return the token ids of prompt and reply."""
    cache_salt: str | None = None

    # Accepted and ignored, since they do not change the reply.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    priority: Any = None
    request_id: Any = None

    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    """This and the next ones: older names of vLLM's for the fields of `structured_outputs`."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    use_beam_search: Unsupported = False
    length_penalty: Unsupported = 1

    @property
    def choices(self) -> int:
        """The number of choices, `n`."""
        return 1 if self.n is None else self.n

    @property
    def counts_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def use_structured_outputs(self) -> None:
        """Set `structured_outputs` from whichever field has what the reply must match."""
        guided = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        fields: dict[str, StructuredOutputs | None] = {
            "structured_outputs": self.structured_outputs,
            "response_format": None if self.response_format is None else self.response_format.structured_outputs,
            **{
                f"guided_{name}": StructuredOutputs(**{name: value})
                for name, value in guided.items()
                if value is not None
            },
        }
        set_fields = {name: value for name, value in fields.items() if value is not None}
        if len(set_fields) > 1:
            raise InvalidRequest(f"{', '.join(set_fields)}: only one of them can be set")
        self.structured_outputs = next(iter(set_fields.values()), None)

    def sampling(self, **params: Any) -> list[SamplingParams]:
        """Return the engine's parameters of each of the `n` choices, with consecutive seeds."""
        self.use_structured_outputs()
        if self.stream_options is not None:
            refuse_unsupported(self.stream_options)
        if not 1 <= self.choices <= MAX_CHOICES:
            raise InvalidRequest(f"must be between 1 and {MAX_CHOICES}", key="n", value=self.n)
        first = self.engine_params(**params)
        seeds = [None if self.seed is None else self.seed + index for index in range(self.choices)]
        return [msgspec.structs.replace(first, seed=seed) for seed in seeds]


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's format: a text, or a conversation that is rendered as for sampling."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to a text; conversations have those of their template."""
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Unsupported = None
    add_generation_prompt: Unsupported = True
    continue_final_message: Unsupported = False
    return_token_strs: Unsupported = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class AdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's format. Unloading needs no path."""

    lora_name: str
    lora_path: str | None = None


class NoFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a call without arguments."""


def refuse_unsupported(body: msgspec.Struct) -> None:
    for field in unsupported_in(body):
        raise InvalidRequest("not supported", key=field, value=getattr(body, field), fix="Omit it.")


def unsupported_in(body: msgspec.Struct) -> Iterator[str]:
    """Return the fields with values that are not supported."""
    neutral = _neutral_values(type(body)).items()
    return (field for field, value in neutral if getattr(body, field) not in (None, value))


@functools.cache
def _neutral_values(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the neutral value of each unsupported field."""
    fields = [field for field in msgspec.structs.fields(kind) if field.type == Unsupported]
    return {
        field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        for field in fields
    }


def envelope(prefix: str, kind: str, model_name: str) -> dict[str, Any]:
    """Return the fields of a response before its choices."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model_name}


def usage_of(prompt_tokens: int, results: Sequence[GenerationResult], choices: int) -> Usage:
    """Return the usage of results in order, `choices` for each prompt; a prompt and its cached part count once."""
    completion = sum(len(result.token_ids) for result in results)
    cached = sum(result.cached_tokens for result in results[::choices])
    details = PromptTokensDetails(cached) if cached else None
    return Usage(prompt_tokens, completion, prompt_tokens + completion, details)
