"""The engine's HTTP schema: token ids in, token ids with logprobs and policy versions out.

`/inference/v1/generate` follows vLLM's request and response form, so that either engine, and clients written for
vLLM, fit. `logprobs` are log-softmax(logits / temperature) over the whole vocabulary, whatever top-p or top-k chose.
"""

from __future__ import annotations

import msgspec

from headrace.rollout.batch import SCHEMA
from headrace.rollout.version import Version

SCHEMA_HEADER = "X-Headrace-Schema"
"""Response header that carries the schema number."""
SESSION_HEADER = "X-Session-Id"
"""Request header of requests that begin alike: an engine with several copies of the model keeps them together."""


MOST_ALTERNATIVES = 20
"""The most that `logprobs` and `prompt_logprobs` may ask for."""
COLDEST, HOTTEST = 1e-4, 1e4
"""Temperatures beyond which logits are no longer numbers, or all alike. 0 is greedy."""
MOST_STOPS = 16
"""Stop strings in a request."""
MOST_STOP_IDS = 1024
"""Stop tokens in a request."""


class SamplingParams(msgspec.Struct, kw_only=True):
    """How to sample. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """0 and -1 are off."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one are not chosen."""
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: list[int] = []
    stop: list[str] = []
    """The request ends with the token that completes one of these in the text; that token is part of the result."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no logprobs. Otherwise the chosen token's, and those of this many of the likeliest tokens."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""

    @property
    def truncates(self) -> bool:
        """Whether part of the distribution is taken away. A greedy choice is none to begin with."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def problem(self) -> str | None:
        """What is wrong with these values, or None."""
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            return f"temperature must be 0, or between {COLDEST:g} and {HOTTEST:g}, not {self.temperature}"
        if not 0 < self.top_p <= 1:
            return f"top_p must be in (0, 1], not {self.top_p}"
        if not -1 <= self.top_k < 1 << 31:
            return f"top_k must be positive, or -1 for off, not {self.top_k}"
        if not 0 <= self.min_p <= 1:
            return f"min_p must be in [0, 1], not {self.min_p}"
        if self.max_tokens is not None and self.max_tokens < 1:
            return f"max_tokens must be at least 1, not {self.max_tokens}"
        if len(self.stop) > MOST_STOPS or not all(self.stop):
            return f"stop must be at most {MOST_STOPS} strings, none of them empty"
        if len(self.stop_token_ids) > MOST_STOP_IDS or min(self.stop_token_ids, default=0) < 0:
            return f"stop_token_ids must be at most {MOST_STOP_IDS} ids, none of them negative"
        for name in ("logprobs", "prompt_logprobs"):
            if not 0 <= (getattr(self, name) or 0) <= MOST_ALTERNATIVES:
                return f"{name} must be between 0 and {MOST_ALTERNATIVES}, not {getattr(self, name)}"
        return None


class GenerateRequest(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    stream: bool = False
    urgent: bool = False
    """To the front of the line: for short requests that ask about the weights of the moment. vLLM does not know it."""


class TopLogprob(msgspec.Struct):
    token_id: int
    logprob: float
    token: str


class TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: float
    token: str
    """Always `token_id:N`: some clients read the id from here."""
    rank: int | None = None
    top_logprobs: list[TopLogprob] = []
    """As many of the likeliest tokens as were asked for."""


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
            raise ValueError(f"there are no tokens [{self.start}, {self.end})")


class GenerateChoice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str
    logprobs: ChoiceLogprobs | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    stop_reason: int | str | None = None
    truncated_logprobs: list[float] | None = None
    """Of each token among what top_p, top_k and min_p left to choose from, if they took anything away."""


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Found in the prefix cache."""


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
    """Load a published directory. The engine checks that its marker names this very version."""

    path: str
    incarnation: int
    step: int


class UpdateWeightsResponse(msgspec.Struct):
    """The acknowledgement: from here on, tokens come from this version."""

    incarnation: int
    step: int
    checksum: str
    schema: int = SCHEMA


class Health(msgspec.Struct):
    """`/health`: who this is and what it is doing. `status` is `ok`, or why it is not (then with HTTP status 503)."""

    status: str
    version: str
    model: str
    running: int
    waiting: int
    paused: bool
    capacity: int
    """Requests that the engine runs at once; more wait in line."""
    max_model_len: int
    vocab_size: int
    engine: str = "embedded"
    """`embedded` or `vllm`."""
    kv_usage: float = 0.0
    """The share of the KV cache that running requests hold, 0 to 1."""
    preemptions: int = 0
    """Requests that lost their place in the KV cache since the start, and were computed again."""
    stands_still: bool = False
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
    """The body of every 4xx and 5xx, in OpenAI's form."""

    error: ErrorDetail
