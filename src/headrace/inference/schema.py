"""The HTTP schema of an engine, token ids in, token ids with logprobs and policy versions out; and its checked reading.

`/inference/v1/generate` has vLLM's request and response format, so clients written for vLLM work. `logprobs` are
log-softmax(logits / temperature) over the whole vocabulary, regardless of top_p, top_k and min_p. Penalties and
structured outputs change the logits before that, and with them the logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from headrace.rollout.schema import SCHEMA
from headrace.rollout.version import Version

T = TypeVar("T")

SCHEMA_HEADER = "X-Headrace-Schema"
"""Response header that carries the schema number."""
SESSION_HEADER = "X-Session-Id"
"""Request header shared by requests with a common prefix: an engine with several replicas routes them to one."""
MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON lacks; the same as vLLM's."""
MAX_LOGPROBS = 20
"""Upper limit of `logprobs` and `prompt_logprobs`."""
PROCESSED = "processed_logprobs"
"""vLLM's name for logprobs after penalties and structured outputs, as `logprobs_mode` of a choice."""


class LatentParams(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How a request thinks in latent space; see `headrace.inference.latents`. Not a field of vLLM's."""

    kind: Literal["hybrid", "soft"] = "hybrid"
    until: str = "</think>"
    """The text that ends the thoughts: the tokens after it are plain. Until it is complete, its tokens are thoughts."""
    tau: float = 0.5
    """Temperature of the distribution over tokens that a latent is computed from."""
    noise: float = 0.33
    """Soft: standard deviation of the noise, relative to the root mean square of the embeddings."""


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a completion must match, in vLLM's form: exactly one of the fields is set."""

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """In the notation of Lark or GBNF."""


class SamplingParams(msgspec.Struct, kw_only=True):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """0 and -1 disable it."""
    min_p: float = 0.0
    """Minimum probability relative to the most likely token."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were sampled before."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it was sampled before."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of the prompt and the completion, and multiplies negative ones."""
    structured_outputs: StructuredOutputs | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: list[int] = []
    stop: list[str] = []
    """Strings that end the request. The token that completes one is part of the result."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no logprobs. Otherwise those of the sampled token and of this many most likely tokens."""
    prompt_logprobs: int | None = None
    """The same for the prompt tokens."""
    latents: LatentParams | None = None
    """Think in latent space, and return the latents. Embedded engine only."""
    routed_experts: bool = False
    """Return the experts of each token, from an engine that records them (`inference.routed_experts`)."""

    @property
    def truncates(self) -> bool:
        """Whether tokens are removed from the distribution before sampling."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalizes(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def logprobs_mode(self) -> str | None:
        """`PROCESSED` if logprobs are not those of the model itself; else None."""
        return PROCESSED if self.penalizes or self.structured_outputs is not None else None


class GenerateRequest(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    stream: bool = False
    flat_logprobs: bool = False
    """Return `flat_logprobs` instead of `logprobs`, whose object per token costs more than the rest of a response.
    Only for responses that are not streamed, without top logprobs."""
    urgent: bool = False
    """Put the request at the front of the queue. Not a field of vLLM's."""


class TopLogprob(msgspec.Struct):
    token_id: int
    logprob: float
    token: str


class TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: float
    token: str
    """Always `token_id:N`, for clients that read the id from here."""
    rank: int | None = None
    top_logprobs: list[TopLogprob] = []
    """The most likely tokens, as many as were requested."""


class ChoiceLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class WeightVersionSpan(msgspec.Struct):
    """Output tokens [start, end) were sampled by weights `version`, written INCARNATION-STEP."""

    version: str
    start: int
    end: int

    def __post_init__(self) -> None:
        Version.parse(self.version)
        if not 0 <= self.start <= self.end:
            raise ValueError(f"[{self.start}, {self.end}) is not a range of tokens")


class GenerateChoice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str | None
    """`stop` or `length`; None in a stream before its end."""
    logprobs: ChoiceLogprobs | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    stop_reason: int | str | None = None
    truncated_logprobs: list[float] | None = None
    """Logprobs in the distribution that top_p, top_k and min_p leave, if they remove anything."""
    flat_logprobs: list[float] | None = None
    """One per token."""
    logprobs_mode: str | None = None
    """`PROCESSED` if penalties or structured outputs changed the distribution that the logprobs are of."""
    latents: bytes | None = None
    """[tokens, hidden size], little-endian float16; in JSON as base64. Rows of zeros are plain tokens."""
    routed_experts: bytes | None = None
    """A `.npy` file, in JSON as base64: [prompt and sampled tokens - 1, layers, experts per token], uint8 or uint16. As
    vLLM's: zeros in layers without experts, and the last token was not computed."""


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Prompt tokens that were in the prefix cache."""


class Usage(msgspec.Struct, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class GenerateResponse(msgspec.Struct):
    request_id: str
    choices: list[GenerateChoice]
    model: str | None = None
    created: int | None = None
    usage: Usage | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


class UpdateWeightsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Load a published directory. The engine checks that its marker names this version."""

    path: str
    incarnation: int
    step: int


class UpdateWeightsResponse(msgspec.Struct):
    """Acknowledges that tokens are sampled from this version from now on."""

    incarnation: int
    step: int
    checksum: str
    schema: int = SCHEMA


class Health(msgspec.Struct):
    """The reply of `/health`. `status` is `ok`, or the reason of a failure (then with HTTP status 503)."""

    status: str
    version: str
    model: str
    running: int
    waiting: int
    paused: bool
    capacity: int
    """Requests that can run at once; more wait in the queue."""
    max_model_len: int
    vocab_size: int
    engine: str = "embedded"
    """`embedded` or `vllm`."""
    root: str | None = None
    """The model's directory or its name on the hub, which requests may name, too; None from an older server."""
    kv_usage: float = 0.0
    """Fraction of the KV cache that running requests occupy, 0 to 1."""
    preemptions: int = 0
    """Requests that were preempted since the start, and recomputed."""
    waits_for_trainer: bool = msgspec.field(default=False, name="stands_still")
    """Whether the engine waits while the trainer holds the device lock."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        Version.parse(self.version)

    @property
    def scores_at_any_temperature(self) -> bool:
        """Whether prompt logprobs follow `temperature`. vLLM computes them at temperature 1."""
        return self.engine != "vllm"


class ErrorDetail(msgspec.Struct):
    message: str
    type: str


class ErrorResponse(msgspec.Struct):
    """The body of every 4xx and 5xx, in OpenAI's format."""

    error: ErrorDetail


class Completion(msgspec.Struct):
    """Sampled tokens; the lists have one entry per token."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[WeightVersionSpan]
    """The version that sampled each range of tokens; `steps` has one entry per token."""
    finish_reason: str
    truncated_logprobs: list[float] | None = None
    """Logprobs in the distribution that top_p and top_k leave; None if they remove nothing or are not reported."""
    latents: np.ndarray | None = None
    """[tokens, hidden size], float16, if they were requested."""
    routes: np.ndarray | None = None
    """[prompt and sampled tokens - 1, layers * experts per token], uint8 or uint16, sorted, if they were requested."""

    @property
    def steps(self) -> np.ndarray:
        """Return the step of each token's version, int32."""
        steps = [Version.parse(span.version).step for span in self.spans]
        return np.repeat(np.array(steps, np.int32), [span.end - span.start for span in self.spans])


class Scores(msgspec.Struct):
    """Logprobs of a given sequence."""

    logprobs: list[float]
    """One per token; 0.0 for the first."""
    version: Version | None
    """The weights that computed them; None from an engine that does not serve a policy."""


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    flat_logprobs: list[float] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    truncated_logprobs: list[float] | None = None
    latents: bytes | None = None
    routed_experts: bytes | None = None


class _Generated(msgspec.Struct):
    """The fields of a `GenerateResponse` that are needed, which decodes faster than all of them."""

    choices: list[_Choice]
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None


_decoder = msgspec.json.Decoder(_Generated)


def read_completion(content: bytes) -> Completion:
    """Decode a completion. Raises `msgspec.DecodeError` or ValueError for an invalid or inconsistent response."""
    choice = _single(_decoder.decode(content).choices)
    logprobs = choice.flat_logprobs
    if logprobs is None and choice.logprobs is not None:
        logprobs = [entry.logprob for entry in choice.logprobs.content]
    if logprobs is None or choice.weight_versions is None:
        raise ValueError("logprobs or weight_versions is missing: this server cannot serve a policy")
    completion = Completion(
        choice.token_ids,
        logprobs,
        choice.weight_versions,
        choice.finish_reason,
        choice.truncated_logprobs,
        None if choice.latents is None else np.frombuffer(choice.latents, "<f2").reshape(len(choice.token_ids), -1),
        None if choice.routed_experts is None else read_routes(choice.routed_experts),
    )
    covered = sum(span.end - span.start for span in completion.spans)
    truncated = completion.logprobs if completion.truncated_logprobs is None else completion.truncated_logprobs
    if not len(completion.token_ids) == len(completion.logprobs) == len(truncated) == covered:
        raise ValueError("token_ids, logprobs and weight_versions have different lengths")
    return completion


def write_routes(routes: np.ndarray, layers: int) -> bytes:
    """Return routes, [tokens, layers * experts per token], as the content of a `.npy` file."""
    file = BytesIO()
    np.save(file, routes.reshape(len(routes), layers, -1))
    return file.getvalue()


def read_routes(content: bytes) -> np.ndarray:
    """Return [tokens, layers * experts per token]. Raises ValueError unless the content is such a file."""
    routes: np.ndarray = np.load(BytesIO(content), allow_pickle=False)
    if routes.ndim != 3 or routes.dtype.kind != "u":
        raise ValueError(f"routed_experts has the shape {routes.shape} and the type {routes.dtype}")
    return np.sort(routes, axis=-1).reshape(len(routes), -1)


def read_scores(content: bytes, token_ids: Sequence[int]) -> Scores:
    """Decode prompt logprobs. Raises `msgspec.DecodeError` or ValueError unless every token has one."""
    response = _decoder.decode(content)
    tables = response.prompt_logprobs or []
    if len(tables) != len(token_ids):
        raise ValueError(f"prompt_logprobs has {len(tables)} entries for {len(token_ids)} tokens")
    scores = [0.0]
    for place, (table, token) in enumerate(zip(tables[1:], token_ids[1:], strict=True), 1):
        if table is None or token not in table:
            raise ValueError(f"prompt_logprobs lacks token {token} at position {place}")
        scores.append(table[token].logprob)
    spans = _single(response.choices).weight_versions  # one step computes the prompt and the first token
    return Scores(scores, Version.parse(spans[0].version) if spans else None)


def _single(choices: Sequence[T]) -> T:
    """Return the only choice of a response. Raises ValueError if there are others."""
    if len(choices) != 1:
        raise ValueError(f"{len(choices)} choices instead of one")
    return choices[0]
