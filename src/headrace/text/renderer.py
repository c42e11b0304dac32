"""Which renderer turns a model's messages into tokens.

A hand-written family can bridge turns exactly and says which token belongs to which message; the model's own template
can do neither. `auto` takes the family of the model's architecture, but only if it reproduces the model's own template
on probe conversations: a renderer that is unfaithful to the template would train on tokens the model never sees.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from renderers import config_from_name, create_renderer
from renderers.base import Renderer

from headrace.errors import InvalidValue
from headrace.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FAMILY_OF_MODEL_TYPE = {"qwen3": "qwen3", "llama": "llama-3", "gpt_oss": "gpt-oss"}
_ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Again?"},
]
_ANSWERED = [*_ASKED, {"role": "assistant", "content": "Hello again."}]
_TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
_CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
_CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "1"},
]


def make_renderer(
    model_directory: str | Path,
    tokenizer: Tokenizer,
    name: str = "auto",
    enable_thinking: bool | None = None,
    thinking_retention: str | None = None,
    tool_parser: str | None = None,
) -> Renderer:
    """The renderer for a local model directory."""
    given = {"enable_thinking": enable_thinking, "thinking_retention": thinking_retention, "tool_parser": tool_parser}
    options = {key: value for key, value in given.items() if value is not None}
    if name == "auto":
        name = _family(Path(model_directory), tokenizer)
    return create_renderer(tokenizer, _config(name, options))


TOOLS_NOT_SHOWN = (
    "has no place for them, so that the model does not see them: describe them in a message, or take a model whose "
    "template shows tools"
)
"""What is said, after whose template it is, where `shows_tools` says no."""


def shows_tools(renderer: Renderer) -> bool:
    """Whether a prompt tells the model of its tools: many templates have no place for them, and leave them out.

    Asked of the renderer itself, since a template may mention tools, and yet show none. Where it renders neither
    conversation, nobody can say, and the real one will.
    """
    tools: Any = [{"type": "function", "function": _TOOL}]
    conversations: list[Any] = [_ASKED[1:2], _ASKED[:2]]
    shown = []
    for messages in conversations:
        try:
            without, told = (renderer.render_ids(messages, tools=given) for given in (None, tools))
        except Exception:  # templates raise what they like about messages they cannot render
            continue
        shown.append(told != without)
    return not shown or any(shown)


def _config(name: str, options: dict[str, Any]) -> Any:
    try:
        base = config_from_name(name)
    except ValueError as error:
        raise InvalidValue(str(error), key="name", value=name) from error
    unknown = [key for key in options if key not in type(base).model_fields]
    if unknown and name != "default":  # the default renderer hands on to the template what it does not know
        raise InvalidValue(f"the renderer {name!r} has no such option", key=unknown[0], fix="Leave it out.")
    return type(base)(name=name, **options) if options else base


def _family(directory: Path, tokenizer: Tokenizer) -> str:
    """The architecture's family if it is faithful to the model's own chat template, else `default`."""
    settings = directory / "config.json"
    model_type = json.loads(settings.read_text()).get("model_type", "") if settings.is_file() else ""
    family = FAMILY_OF_MODEL_TYPE.get(model_type)
    if family is None:
        return "default"
    try:
        renderer = create_renderer(tokenizer, config_from_name(family))
        faithful = tokenizer.chat_template is None or all(
            renderer.render_ids(messages, add_generation_prompt=prompt)
            == tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
            for messages, prompt in ((_ASKED, True), (_ANSWERED, False))
        )
    except (AssertionError, KeyError, RuntimeError, ValueError, TemplateError) as error:
        # The family's special tokens or its encoder's files are missing, or the template refuses such a conversation.
        log.info("renderer %s does not fit %s (%s); using the model's own chat template", family, directory, error)
        return "default"
    if not faithful:
        log.info("renderer %s differs from the chat template of %s; using the template", family, directory)
        return "default"
    if not _renders_tools_alike(renderer, tokenizer):
        log.warning("renderer %s shows tools otherwise than the chat template of %s does", family, directory)
    return family


def _renders_tools_alike(renderer: Renderer, tokenizer: Tokenizer) -> bool:
    """Whether tools look as in the model's own template, where that knows of tools."""
    if "tools" not in (tokenizer.chat_template or ""):
        return True
    tools: Any = [{"type": "function", "function": _TOOL}]
    called: Any = _CALLED
    try:
        template = tokenizer.apply_chat_template(called, tools=tools, add_generation_prompt=True)
    except TemplateError:
        return False
    return bool(renderer.render_ids(called, tools=tools, add_generation_prompt=True) == template)
