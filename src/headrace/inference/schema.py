"""The engine's HTTP schema: token ids in, token ids with logprobs and policy versions out.

`/inference/v1/generate` follows vLLM's request and response form, so that either engine, and clients written for
vLLM, fit. `logprobs` are log-softmax(logits / temperature) over the whole vocabulary, whatever top-p or top-k chose.
"""

from __future__ import annotations

import math

import msgspec

from headrace.rollout.batch import SCHEMA

SCHEMA_HEADER = "X-Headrace-Schema"
"""Response header that carries the schema number."""


class SamplingParams(msgspec.Struct, kw_only=True):
    """How to sample. Temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def truncates(self) -> bool:
        """Whether top_k or top_p take part of the distribution away. A greedy choice is none to begin with."""
        return self.temperature > 0 and (self.top_k != -1 or self.top_p < 1)

    def problem(self) -> str | None:
        """What is wrong with these values, or None."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            return f"temperature must be a finite number >= 0, not {self.temperature}"
        if not 0 < self.top_p <= 1:
            return f"top_p must be in (0, 1], not {self.top_p}"
        if self.top_k == 0 or self.top_k < -1:
            return f"top_k must be positive, or -1 for off, not {self.top_k}"
        if self.max_tokens is not None and self.max_tokens < 1:
            return f"max_tokens must be at least 1, not {self.max_tokens}"
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


class TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: float
    token: str
    """Always `token_id:N`: some clients read the id from here."""
    rank: int | None = None


class ChoiceLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class WeightVersionSpan(msgspec.Struct):
    """Output tokens [start, end) were sampled by weights `version`, written INCARNATION-STEP."""

    version: str
    start: int
    end: int


class GenerateChoice(msgspec.Struct):
    index: int
    token_ids: list[int]
    finish_reason: str
    logprobs: ChoiceLogprobs | None = None
    weight_versions: list[WeightVersionSpan] | None = None
    stop_reason: int | str | None = None
    truncated_logprobs: list[float] | None = None
    """Of each token among what top_p and top_k left to choose from, if they took anything away."""


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateResponse(msgspec.Struct):
    request_id: str
    choices: list[GenerateChoice]
    model: str | None = None
    created: int | None = None
    usage: Usage | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


class UpdateWeightsRequest(msgspec.Struct):
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
    """`/health`: who this is and what it is doing."""

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
    schema: int = SCHEMA


class ErrorDetail(msgspec.Struct):
    message: str
    type: str


class ErrorResponse(msgspec.Struct):
    """The body of every 4xx and 5xx, in OpenAI's form."""

    error: ErrorDetail
