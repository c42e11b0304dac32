"""Small models of several families, without weights: byte-level tokenizers made here, and the families' renderers.

A few merges let a text be written in tokens that its own rendering would not use. `written` is what a model of the
family samples for a reply, stop token included. OpenAI's encoder for gpt-oss downloads its vocabulary, so here its
messages are laid out by `Harmony`, on our tokenizer.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import openai_harmony as harmony
import tokenizers
from renderers.base import Renderer
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer

MERGES = "t h|th e|Ġ the|a n|an d|i n|e r|o n|l l|ll o|h e|he llo|c a|ca t|1 2|12 3|Ċ Ċ|. Ċ|} Ċ|Ġ Ġ|u s|us er|à ©"
CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass
class Said:
    """A reply as people would put it."""

    text: str = ""
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    thought: str = ""


@dataclass
class Family:
    """`special` tokens are no text, `markup` is; `write` lays a reply out, without the token that ends it."""

    renderer: str
    special: tuple[str, ...]
    markup: tuple[str, ...]
    stop: str
    write: Callable[[Said], str]
    options: dict[str, Any] = field(default_factory=dict)
    thinks: bool = False
    stop_after_call: str = ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain_text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen3(said: Said) -> str:
    thought = f"<think>\n{said.thought}\n</think>\n\n" if said.thought else ""
    calls = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'
        for name, arguments in said.calls
    )
    return thought + said.text + ("\n" if said.text and calls else "") + calls


def _qwen35(said: Said) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        given = (f"<parameter={key}>\n{_plain_text(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{''.join(given)}</function>\n</tool_call>"

    calls = "\n".join(call(*each) for each in said.calls)
    return f"{said.thought}\n</think>\n\n{said.text}" + ("\n\n" if said.text and calls else "") + calls


def _llama(said: Said) -> str:
    return "".join(f'{{"name": "{name}", "parameters": {_json(given)}}}' for name, given in said.calls[:1]) or said.text


def _glm(said: Said) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{_plain_text(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"

    before = f"\n<think>{said.thought}</think>" + (f"\n{said.text}" if said.text else "")
    if said.calls and said.text:
        return before + "\n" + "".join(call(*each) for each in said.calls)
    return before + "".join("\n" + call(*each) for each in said.calls)


def _deepseek_token(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"


def _deepseek(said: Said) -> str:
    begin, separator, end = map(_deepseek_token, ("tool▁call▁begin", "tool▁sep", "tool▁call▁end"))
    calls = "".join(
        f"{begin}function{separator}{name}\n```json\n{_json(arguments)}\n```{end}" for name, arguments in said.calls
    )
    section = map(_deepseek_token, ("tool▁calls▁begin", "tool▁calls▁end"))
    return said.text + (calls.join(section) if calls else "")


def _kimi(said: Said) -> str:
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for n, (name, arguments) in enumerate(said.calls)
    )
    return said.text + (f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else "")


def _minimax(said: Said) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        given = (f'<parameter name="{key}">{_plain_text(value)}</parameter>\n' for key, value in arguments.items())
        return f'<invoke name="{name}">\n{"".join(given)}</invoke>\n'

    calls = "".join(call(*each) for each in said.calls)
    text = f"{said.thought}\n</think>\n\n{said.text}"
    return text + (f"\n<minimax:tool_call>\n{calls}</minimax:tool_call>" if calls else "")


def _gpt_oss(said: Said) -> str:
    blocks = [f"assistant<|channel|>final<|message|>{said.text}"] if said.text or not said.calls else []
    blocks += [
        f"assistant to=functions.{name}<|channel|>commentary<|message|>{_json(arguments)}"
        for name, arguments in said.calls[:1]  # the token that ends a call ends the turn
    ]
    return said.thought + "".join(f"<|end|><|start|>{block}" for block in blocks)


_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>")
_TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GLM_TOKENS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK_TOKENS = tuple(
    _deepseek_token(name)
    for name in (
        *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep"),
        *(f"tool▁{part}▁{end}" for part in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
    )
)
_KIMI_TOKENS = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_LLAMA_TOKENS = tuple(
    f"<|{name}|>" for name in ("begin_of_text", "start_header_id", "end_header_id", "eot_id", "end_of_text", "eom_id")
)
_HARMONY_TOKENS = tuple(f"<|{n}|>" for n in ("start", "end", "return", "call", "channel", "message", "constrain"))

_qwen3_family = functools.partial(Family, "qwen3", _CHATML_TOKENS, (*_THINK, *_TOOL_TOKENS), "<|im_end|>", _qwen3)
_qwen35_family = functools.partial(
    Family, "qwen3.5", (*_CHATML_TOKENS, *_VISION), (*_THINK, *_TOOL_TOKENS), "<|im_end|>", _qwen35, thinks=True
)
_glm_family = functools.partial(
    Family,
    "glm-4.5",
    _GLM_TOKENS,
    (*_THINK, *_TOOL_TOKENS[:2], *_ARGUMENTS),
    "<|user|>",
    _glm,
    thinks=True,
    stop_after_call="<|observation|>",
)
_minimax_family = functools.partial(
    Family,
    "minimax-m2",
    ("]~!b[", "]~b]", "[e~["),
    (*_THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
    "[e~[",
    _minimax,
    thinks=True,
)
_gpt_oss_family = functools.partial(
    Family, "gpt-oss", _HARMONY_TOKENS, (), "<|return|>", _gpt_oss, thinks=True, stop_after_call="<|call|>"
)
ALL = {"thinking_retention": "all"}
FAMILIES = {
    "qwen3": _qwen3_family(thinks=True),
    "qwen3-all": _qwen3_family(options=ALL, thinks=True),
    "qwen3-without-thoughts": _qwen3_family(options={"enable_thinking": False}),
    "qwen3.5": _qwen35_family(),
    "qwen3.5-all": _qwen35_family(options=ALL),
    "llama-3": Family("llama-3", _LLAMA_TOKENS, (), "<|eot_id|>", _llama),
    "glm-4.5": _glm_family(),
    "glm-4.5-all": _glm_family(options=ALL),
    "deepseek-v3": Family("deepseek-v3", _DEEPSEEK_TOKENS, (), _deepseek_token("end▁of▁sentence"), _deepseek),
    "kimi-k2": Family("kimi-k2", _KIMI_TOKENS, (), "<|im_end|>", _kimi),
    "minimax-m2": _minimax_family(),
    "minimax-m2-all": _minimax_family(options=ALL),
    "gpt-oss": _gpt_oss_family(),
    "gpt-oss-all": _gpt_oss_family(options=ALL),
    "default": Family(
        "default", _CHATML_TOKENS, (*_THINK, *_TOOL_TOKENS), "<|im_end|>", _qwen3, {"tool_parser": "qwen3"}
    ),
}
KEEPS_HISTORY = [
    name
    for name in FAMILIES
    if name.endswith("-all") or name in ("qwen3-without-thoughts", "llama-3", "deepseek-v3", "kimi-k2")
]
"""Whose conversations go on from exact tokens whatever comes next."""


class Model:
    """A family's tokenizer and renderer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.family = FAMILIES[name]
        with TemporaryDirectory() as directory:
            write_model(Path(directory), self.family)
            self.tokenizer = Tokenizer(directory)
            with patch("renderers.gpt_oss.load_harmony_encoding", lambda _: Harmony(self.tokenizer)):
                self.renderer: Renderer = make_renderer(
                    directory, self.tokenizer, self.family.renderer, **self.family.options
                )
        self.added = set(self.tokenizer.convert_tokens_to_ids([*self.family.special, *self.family.markup]))
        self.stops = self.renderer.get_stop_token_ids()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def written(self, said: Said) -> list[int]:
        """The canonical tokens of a reply."""
        stop = (said.calls and self.family.stop_after_call) or self.family.stop
        return self.encode(self.family.write(said) + stop)

    def respelled(self, ids: Sequence[int], rng: Random, share: float = 0.5) -> list[int]:
        """The same text in other tokens: a share of those that were merged falls apart."""
        spelled: list[int] = []
        for token in ids:
            symbols = self.tokenizer.convert_ids_to_tokens(token)
            apart = token not in self.added and rng.random() < share
            spelled += self.tokenizer.convert_tokens_to_ids(list(symbols)) if apart else [token]
        return spelled

    def body(self, role: str, content: str) -> str:
        """How the chat format writes what a user or a tool says."""
        if self.family.renderer == "llama-3":
            return _json(content) if role == "tool" else content.strip()
        return content.strip() if self.family.renderer == "qwen3.5" else content


@functools.cache
def load(name: str) -> Model:
    return Model(name)


def write_model(directory: Path, family: Family) -> None:
    """A model directory without weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(pair.split()) for pair in MERGES.split("|")]
    symbols = [*alphabet, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({symbol: n for n, symbol in enumerate(symbols)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in family.special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in family.markup])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": family.stop}))
    (directory / "chat_template.jinja").write_text(CHATML)


class Harmony:
    """Messages in OpenAI's format for gpt-oss. Text that looks like a special token stays text, as it does there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ordinary = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        self._ordinary.encode_special_tokens = True

    def render(self, message: harmony.Message) -> list[int]:
        author = message.author.name or message.author.role.value
        header = author + (f" to={message.recipient}" if message.recipient else "")
        if message.channel:
            header += f"<|channel|>{message.channel}"
        calls = message.author.role is harmony.Role.ASSISTANT and message.recipient
        text = "".join(_harmony_text(part) for part in message.content)
        return [
            *self._tokenizer.encode(f"<|start|>{header}<|message|>"),
            *self._ordinary.encode(text).ids,
            *self._tokenizer.encode("<|call|>" if calls else "<|end|>"),
        ]

    def render_conversation(self, conversation: harmony.Conversation) -> list[int]:
        return [token for message in conversation.messages for token in self.render(message)]


def _harmony_text(content: harmony.Content) -> str:
    if isinstance(content, harmony.TextContent):
        return content.text
    if isinstance(content, harmony.DeveloperContent):
        tools = _json([tool.model_dump() for space in (content.tools or {}).values() for tool in space.tools])
        return f"# Instructions\n\n{content.instructions or ''}\n\n# Tools\n\n{tools}"
    return "You are a model."
