"""Models that an algorithm refers to: the live policy, or a frozen model on a server."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from headrace.config.base import Config
from headrace.config.headers import find_invalid_header
from headrace.config.model import HttpUrl
from headrace.errors import InvalidValue


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
    def _is_served(cls, given: Any) -> Any:
        if isinstance(given, dict) and not given.get("base_url"):
            raise InvalidValue(
                f"the server of {given.get('name', 'a frozen model')} is not set",
                key="base_url",
                value=given.get("base_url"),
                fix='Set base_url = "http://host:port/v1".',
            )
        return given

    @field_validator("base_url", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @field_validator("api_key_var")
    @classmethod
    def _names_a_variable(cls, given: str | None) -> str | None:
        if given is not None and not re.fullmatch(r"[A-Za-z_]\w*", given):
            # The value is not shown: it may be a key, by mistake.
            raise InvalidValue(
                "not the name of an environment variable",
                fix="Put the key into a variable, and write the name of the variable here, never the key itself.",
            )
        return given

    @field_validator("headers", mode="before")
    @classmethod
    def _can_be_sent(cls, given: Any) -> Any:
        # Before pydantic checks types: its error would show a value, which may be a secret.
        if not isinstance(given, dict):
            raise InvalidValue("not a table", fix='Write headers as { X-Team = "mill" }.')
        if (fact := find_invalid_header(given)) is not None:
            raise InvalidValue(fact)
        return given


def _model_reference(given: Any) -> Any:
    if isinstance(given, str) and given != "policy":
        raise InvalidValue(
            'a text other than "policy" does not say where the model is served',
            value=given,
            fix=f'Write "policy", or a table: {{ name = "{given}", base_url = "http://host:port/v1" }}.',
        )
    return given


def describe_model(model: ModelReference) -> str:
    return model if model == "policy" else f"{model.name} at {', '.join(model.base_url)}"


ModelReference = Annotated[
    Annotated[Literal["policy"], Tag("policy")] | Annotated[FrozenModelConfig, Tag("frozen")],
    Discriminator(lambda given: "policy" if isinstance(given, str) else "frozen"),
    BeforeValidator(_model_reference),
]
"""The live policy, or a frozen model on a server."""
