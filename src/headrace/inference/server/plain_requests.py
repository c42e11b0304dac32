"""What is asked of the routes that sample nothing: tokens of texts and back, and admin calls.

What else is asked of admin calls is in the schema, since our own client makes it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.inference.server.openai_request import Unsupported


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """In vLLM's form: a text, or a conversation as it would be sampled from."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    """Of a text: whether the tokenizer adds what it begins texts with. A conversation has what its format gives it."""
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Unsupported = None
    add_generation_prompt: Unsupported = True
    continue_final_message: Unsupported = False
    return_token_strs: Unsupported = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class AdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """In vLLM's form. Unloading needs no path."""

    lora_name: str
    lora_path: str | None = None


class NoFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a call that says everything by its route."""
