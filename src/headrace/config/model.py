"""Sections for models: the policy, its renderer and sampling, and frozen models that an algorithm refers to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from headrace.config.base import Config, as_table
from headrace.config.headers import find_invalid_header
from headrace.errors import InvalidValue


def _http_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        address = url.partition("://")[2] or url or "host:port"
        raise InvalidValue("not a URL", value=url, fix=f'Write "http://{address}".')
    try:
        _ = parts.port
    except ValueError as error:
        raise InvalidValue(f"not a URL: {error}", value=url, fix='Write "http://host:port".') from error
    return url


HttpUrl = Annotated[str, AfterValidator(_http_url)]
"""The URL of a server: `http://host:port`."""


class LatentsConfig(Config):
    """Think in latent space: input embeddings of thoughts hold more than the sampled token; a text is the `type`."""

    type: Literal["hybrid", "soft"] = "hybrid"
    """`hybrid`: the token's embedding, blended by trained gates with the expected one (arXiv 2505.18454); `soft`: the
    expected embedding with noise, for training only (arXiv 2509.19170)."""
    until: str = Field("</think>", min_length=1)
    """The text that ends the thoughts of a completion; tokens after it are plain."""
    tau: float = Field(0.5, gt=0)
    """Temperature of the distribution over tokens whose expected embedding is used."""
    noise: float = Field(0.33, gt=0)
    """`soft`: standard deviation of the noise, relative to the root mean square of the embeddings."""
    gates_lr: float = Field(1e-4, gt=0)
    """`hybrid`: peak learning rate of the gates' matrices, which the scheduler scales as `trainer.optim.lr`."""
    retention_lr: float = Field(1e-3, gt=0)
    """`hybrid`: the same of the vector that sets how much of a token's embedding is kept."""

    @model_validator(mode="before")
    @classmethod
    def _type_alone(cls, value: Any) -> Any:
        return as_table(value, "type")

    @property
    def has_gates(self) -> bool:
        return self.type == "hybrid"

    @property
    def request(self) -> dict[str, Any]:
        """The fields of a request's `LatentParams`."""
        return {"kind": self.type, **self.model_dump(include={"until", "tau", "noise"})}


class ModelConfig(Config):
    """The model: exactly one of `name`, `init` and `sft` is set."""

    name: str | None = None
    """A local directory, or a name on the Hugging Face hub."""
    init: Literal["tiny"] | None = None
    """A recipe of `headrace init-model`; the model is generated on first use and cached."""
    sft: Path | None = None
    """An SFT run file, relative to this file; the model is trained on first use and cached."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on a GPU, float32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's files."""
    latents: LatentsConfig | None = None
    """Think in latent space; unset: in tokens. Embedded engine and `orchestrator.max_async_level = 0` only."""

    def problems(self) -> Iterator[InvalidValue]:
        sources = [key for key in ("name", "init", "sft") if getattr(self, key) is not None]
        if len(sources) > 1:
            *others, key = sources
            fact = f"{' and '.join(others)} also {'sets' if len(others) == 1 else 'set'} the model"
            yield self.invalid(key, fact, "Give one of name, init and sft.")


MODEL_ORIGINS = ("model.name", "model.init", "model.sft")
"""Keys of a run file of which one sets the model."""


class RendererConfig(Config):
    """How chat messages are rendered to tokens; a text is the `name`."""

    name: str = "auto"
    """`auto`: the renderer of the model's family if it reproduces the tokenizer's chat template, else `default`, the
    template itself."""
    enable_thinking: bool | None = None
    """Whether the generation prompt opens a thinking block; unset: the default of the model's family."""
    thinking_retention: Literal["tool_cycle", "all"] | None = None
    """`all` keeps a multi-turn conversation in one sample for families that strip earlier thinking."""
    tool_parser: str | None = None
    """How `default` reads tool calls: qwen3, qwen3.5, glm or deepseek-v3; other renderers have their own."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return as_table(value, "name")


class SamplingConfig(Config):
    """How an environment's turns are sampled; unset keys are inherited."""

    temperature: float | None = Field(None, ge=0)
    """Sampling temperature; 0: greedy."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Sample from the most likely tokens with this total probability (nucleus sampling)."""
    top_k: int | None = None
    """Sample from this many most likely tokens; -1: from all."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Sample from tokens with at least this probability relative to the most likely one; 0: from all."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens per turn."""

    def problems(self) -> Iterator[InvalidValue]:
        if self.top_k is not None and self.top_k != -1 and self.top_k < 1:
            yield self.invalid("top_k", "not a number of tokens", "Set 1 or more, or -1 for off.")

    def over(self, defaults: SamplingConfig) -> SamplingConfig:
        """Return these values where they are set, else the defaults."""
        return defaults.model_copy(update=self.model_dump(exclude_none=True))


class FrozenModelConfig(Config):
    """A frozen model on a server: `headrace serve`, or any server with an OpenAI-compatible API."""

    name: str
    """The model name in the server's API."""
    base_url: list[HttpUrl] = Field(min_length=1)
    """URLs of its servers, as http://host:port/v1; each request goes to the least busy one."""
    api_key_var: str | None = None
    """The environment variable with the API key; unset: no key is sent."""
    timeout: float = Field(120.0, gt=0)
    """Timeout of one request in seconds."""
    retry_for: float = Field(30.0, ge=0)
    """Seconds for which a request with a transient failure is retried."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request. They are written to the run's directory: a key belongs in `api_key_var`."""

    @model_validator(mode="before")
    @classmethod
    def _require_server(cls, table: Any) -> Any:
        if isinstance(table, dict) and not table.get("base_url"):
            fact = f"the server of {table.get('name', 'a frozen model')} is not set"
            fix = 'Set base_url = "http://host:port/v1".'
            raise InvalidValue(fact, key="base_url", value=table.get("base_url"), fix=fix)
        return table

    @field_validator("base_url", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("api_key_var")
    @classmethod
    def _names_a_variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_]\w*", name):
            # The value is not shown: it may be a key, by mistake.
            fix = "Put the key into a variable, and write the name of the variable here, never the key itself."
            raise InvalidValue("not the name of an environment variable", fix=fix)
        return name

    @field_validator("headers", mode="before")
    @classmethod
    def _can_be_sent(cls, headers: Any) -> Any:
        # Before pydantic checks types: its error would show a value, which may be a secret.
        if not isinstance(headers, dict):
            raise InvalidValue("not a table", fix='Write headers as { X-Team = "mill" }.')
        if (fact := find_invalid_header(headers)) is not None:
            raise InvalidValue(fact)
        return headers


class PastPolicyConfig(Config):
    """The policy some steps ago."""

    every: int = Field(ge=1)
    """Take the current policy after each step that this divides; until the first one, it is the start of the run."""


def model_tag(reference: Any) -> str:
    """Return the kind of a reference to a model: a text, a past policy or a frozen model."""
    if isinstance(reference, str):
        return "text"
    return (
        "past"
        if isinstance(reference, PastPolicyConfig) or (isinstance(reference, dict) and "every" in reference)
        else "frozen"
    )


def only_text(text: str, other: str = "") -> BeforeValidator:
    """Refuse texts but this one; `other` is what may also be written, for the error."""

    def check(reference: Any) -> Any:
        if isinstance(reference, str) and reference != text:
            fix = f'Write "{text}", {other}or a table: {{ name = "{reference}", base_url = "http://host:port/v1" }}.'
            raise InvalidValue(
                f'a text other than "{text}" does not say where the model is served', value=reference, fix=fix
            )
        return reference

    return BeforeValidator(check)


PAST = "{ every = 50 }, "
"""How a past policy is written, for errors."""


def describe_model(model: ModelReference) -> str:
    return model if model == "policy" else f"{model.name} at {', '.join(model.base_url)}"


ModelReference = Annotated[
    Annotated[Literal["policy"], Tag("text")] | Annotated[FrozenModelConfig, Tag("frozen")],
    Discriminator(lambda given: "text" if isinstance(given, str) else "frozen"),
    only_text("policy"),
]
"""The live policy, or a frozen model on a server."""

TeacherReference = Annotated[
    Annotated[Literal["policy"], Tag("text")]
    | Annotated[PastPolicyConfig, Tag("past")]
    | Annotated[FrozenModelConfig, Tag("frozen")],
    Discriminator(model_tag),
    only_text("policy", PAST),
]
"""The live policy, the policy some steps ago, or a frozen model on a server."""
