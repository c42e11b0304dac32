"""The renderer that converts a model's messages to tokens.

A hand-written family can bridge turns exactly and attributes each token to a message; the model's own template can do
neither. `auto` selects the family of the model's architecture, but only if it reproduces the model's own template on
test conversations: otherwise training would use tokens that the model never sees.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from renderers import config_from_name, create_renderer
from renderers.base import Renderer

from headrace.errors import InvalidValue
from headrace.text.hub import read_settings
from headrace.text.tokenizer import Tokenizer
from headrace.text.turn_markers import reserve_turn_markers

log = logging.getLogger(__name__)

FAMILY_OF_MODEL_TYPE = {"qwen3": "qwen3", "llama": "llama-3", "gpt_oss": "gpt-oss"}
_PROMPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Again?"},
]
_WITH_REPLY = [*_PROMPT, {"role": "assistant", "content": "Hello again."}]
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
_ADD = {"name": "add", "description": "Adds.", "parameters": _PARAMETERS}
_TOOLS: list[Any] = [{"type": "function", "function": _ADD}]
_CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
_WITH_TOOL_RESULT: list[dict[str, Any]] = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "1"},
]


TOOLS_NOT_SHOWN = (
    "does not show tools to the model: describe them in a message, or use a model whose template shows tools"
)
"""End of a message about a chat template for which `shows_tools` returns false."""


def make_renderer(
    model_directory: str | Path,
    tokenizer: Tokenizer,
    name: str = "auto",
    enable_thinking: bool | None = None,
    thinking_retention: str | None = None,
    tool_parser: str | None = None,
) -> Renderer:
    """Return the renderer for a local model directory."""
    if name == "auto":
        name = _select_family(Path(model_directory), tokenizer)
    try:
        config = config_from_name(name)
    except ValueError as error:
        raise InvalidValue(str(error), key="name", value=name) from error
    options = {"enable_thinking": enable_thinking, "thinking_retention": thinking_retention, "tool_parser": tool_parser}
    options = {key: value for key, value in options.items() if value is not None}
    unknown = [key for key in options if key not in type(config).model_fields]
    if unknown and name != "default":  # the default renderer passes unknown options to the template
        raise InvalidValue(f"the renderer {name!r} has no such option", key=unknown[0], fix="Leave it out.")
    kind: Any = type(config)
    renderer = create_renderer(tokenizer, kind(name=name, **options) if options else config)
    if name != "gpt-oss":  # OpenAI's own encoder encodes all text as characters
        reserve_turn_markers(renderer, tokenizer)
    return renderer


def shows_tools(renderer: Renderer) -> bool:
    """Return whether prompts contain the tools: many templates leave them out.

    This is tested by rendering, since a template may mention tools and yet show none. Where both test conversations
    fail to render, it is unknown, and true is returned.
    """
    conversations: list[Any] = [_PROMPT[1:2], _PROMPT[:2]]
    shown = []
    for messages in conversations:
        try:
            shown.append(renderer.render_ids(messages, tools=None) != renderer.render_ids(messages, tools=_TOOLS))
        except Exception:  # templates raise any type for messages they cannot render
            continue
    return not shown or any(shown)


def _select_family(directory: Path, tokenizer: Tokenizer) -> str:
    """Return the architecture's family if it reproduces the model's own chat template, else `default`."""
    settings = directory / "config.json"
    model_type = read_settings(settings).get("model_type", "") if settings.is_file() else ""
    family = FAMILY_OF_MODEL_TYPE.get(model_type)
    if family is None:
        return "default"
    try:
        renderer = create_renderer(tokenizer, config_from_name(family))
        is_faithful = tokenizer.chat_template is None or all(
            renderer.render_ids(messages, add_generation_prompt=prompt)
            == tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
            for messages, prompt in ((_PROMPT, True), (_WITH_REPLY, False))
        )
    except (AssertionError, KeyError, RuntimeError, ValueError, TemplateError) as error:
        # The family's special tokens or its encoder's files are missing, or the template refuses the conversation.
        log.info("renderer %s does not fit %s (%s); using the model's own chat template", family, directory, error)
        return "default"
    if not is_faithful:
        log.info("renderer %s differs from the chat template of %s; using the template", family, directory)
        return "default"
    if not _renders_tools_alike(renderer, tokenizer):
        log.warning("renderer %s renders tools differently from the chat template of %s", family, directory)
    return family


def _renders_tools_alike(renderer: Renderer, tokenizer: Tokenizer) -> bool:
    """Return whether tools are rendered as by the model's own template; true if that does not support tools."""
    if "tools" not in (tokenizer.chat_template or ""):
        return True
    messages: Any = _WITH_TOOL_RESULT
    try:
        expected = tokenizer.apply_chat_template(messages, tools=_TOOLS, add_generation_prompt=True)
    except TemplateError:
        return False
    return bool(renderer.render_ids(messages, tools=_TOOLS, add_generation_prompt=True) == expected)
