"""A model directory's tokenizer, built on `tokenizers` and `jinja2` only; and one of bytes for tiny models.

The class of `transformers` takes seconds to import and imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from headrace.errors import BadInput
from headrace.text.hub import read_settings

MAX_NFC_CHARS = 4
"""The most characters that NFC composes into one."""
RELEASE_GIL_LENGTH = 1 << 13
"""Length in characters or tokens from which a text or a list of tokens is converted without holding the GIL."""
BREAK = "\ud800"
"""A lone surrogate, which no valid text contains. The texts before and after it are encoded separately."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of Qwen3's chat format that decoding keeps as text, as Qwen3 does."""


class TokenizerError(BadInput):
    """A model directory without a usable tokenizer or chat template."""


class Tokenizer:
    """The subset of a Hugging Face tokenizer that rendering needs, including the protocol of `renderers`."""

    def __init__(self, directory: str | Path) -> None:
        root = Path(directory)
        file = root / "tokenizer.json"
        if not file.is_file():
            fact = "no such file: a model directory needs its tokenizer beside the weights"
            fix = "Save it there with AutoTokenizer.from_pretrained(...).save_pretrained(...)."
            raise TokenizerError(fact, file=file, fix=fix)
        self.name_or_path = str(directory)
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise TokenizerError(f"not a tokenizer: {error}", file=file) from error
        config_file = root / "tokenizer_config.json"
        settings = read_settings(config_file) if config_file.is_file() else {}
        self.chat_template = _read_chat_template(root, settings)
        names = ("eos_token", "bos_token", "unk_token", "pad_token")
        tokens = map(settings.get, names)  # each a text, or a record with `content`
        self.eos_token, self.bos_token, self.unk_token, self.pad_token = (
            token.get("content") if isinstance(token, dict) else token for token in tokens
        )
        self.eos_token_id, self.bos_token_id, self.unk_token_id = (
            None if token is None else self.backend.token_to_id(token)
            for token in (self.eos_token, self.bos_token, self.unk_token)
        )
        self.vocab_size: int = self.backend.get_vocab_size()

    @property
    def control_tokens(self) -> dict[int, str]:
        """Special tokens, which text should not contain, by id; without `unk_token`."""
        added = self.backend.get_added_tokens_decoder()
        return {token: entry.content for token, entry in added.items() if entry.special and token != self.unk_token_id}

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        parts = self._encode_parts(text, add_special_tokens)
        return [token for encoding, skipped, _ in parts for token in encoding.ids[skipped:]]

    def _encode_parts(self, text: str, add_special_tokens: bool) -> list[tuple[tokenizers.Encoding, int, int]]:
        """Return for each part between breaks its encoding, the tokens to skip in it, and its offset in `text`."""
        if BREAK not in text:
            return [(self._encode_text(text, add_special_tokens), 0, 0)]
        parts, start = [], 0
        for part in text.split(BREAK):
            newline = self._newline if start and part else []
            encoding = self._encode_text("\n" + part if newline else part, add_special_tokens=False)
            if encoding.ids[: len(newline)] != newline:
                encoding, newline = self._encode_text(part, add_special_tokens=False), []
            parts.append((encoding, len(newline), start - bool(newline)))
            start += len(part) + 1
        return parts

    @cached_property
    def _newline(self) -> list[int]:
        """Tokens of a line break if the tokenizer adds a space before each text, but not after a line break; or []."""
        letter = self.backend.encode("a", add_special_tokens=False).ids
        adds_space = self.decode([*letter, *letter]) != "aa"
        return self.backend.encode("\n", add_special_tokens=False).ids if adds_space else []

    def _encode_text(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if len(text) < RELEASE_GIL_LENGTH:
            return self.backend.encode(text, add_special_tokens=add_special_tokens)
        [encoding] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)  # releases the GIL
        return encoding

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if len(ids) < RELEASE_GIL_LENGTH:
            return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))
        [text] = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)  # releases the GIL
        return str(text)

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of a text's tokens from its length; 0 where the tokenizer may drop characters."""
        if self._max_token_chars is None:
            return 0
        return (len(text) if text.isascii() else len(text) // MAX_NFC_CHARS) // self._max_token_chars

    @cached_property
    def _max_token_chars(self) -> int | None:
        """The most characters of one token (a byte-level vocabulary has a character per byte); None if unbounded."""
        return max(map(len, self.backend.get_vocab())) if _keeps_every_character(self.backend) else None

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            token_id = self.backend.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        if isinstance(ids, int):
            return self.backend.id_to_token(ids)
        return [self.backend.id_to_token(i) for i in ids]

    def __call__(
        self, text: str, add_special_tokens: bool = False, return_offsets_mapping: bool = False, **_: Any
    ) -> dict[str, Any]:
        parts = self._encode_parts(text, add_special_tokens)
        ids = [token for encoding, skipped, _ in parts for token in encoding.ids[skipped:]]
        result: dict[str, Any] = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if return_offsets_mapping and len(parts) == 1:
            result["offset_mapping"] = parts[0][0].offsets
        elif return_offsets_mapping:
            spans = ((span, offset) for encoding, skipped, offset in parts for span in encoding.offsets[skipped:])
            result["offset_mapping"] = [(first + offset, last + offset) for (first, last), offset in spans]
        return result

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Render messages with the model's own Jinja template, as transformers does."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        variables = {"messages": messages, "tools": tools, **{name: getattr(self, name) or "" for name in names}}
        text = self._template.render(**variables, add_generation_prompt=add_generation_prompt, **kwargs)
        if not tokenize:
            return text
        ids = self.encode(text)
        return {"input_ids": ids} if return_dict else ids

    @cached_property
    def _template(self) -> jinja2.Template:
        if self.chat_template is None:
            fix = "Add chat_template.jinja, or `chat_template` in tokenizer_config.json."
            raise TokenizerError("the model has no chat template", file=self.name_or_path, fix=fix)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        # As in `transformers`: unlike jinja2's own `tojson`, without escaping HTML.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.chat_template)


@lru_cache
def shared_tokenizer(directory: Path) -> Tokenizer:
    """Return a cached tokenizer: a large vocabulary takes most of a second to read."""
    return Tokenizer(directory)


def common_prefix_length(left: Sequence[object], right: Sequence[object]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def _read_chat_template(root: Path, settings: dict[str, Any]) -> str | None:
    file = root / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _keeps_every_character(backend: tokenizers.Tokenizer) -> bool:
    """Return whether every character of a text is in one of its tokens: true for a complete byte-level vocabulary."""
    steps = list(_components(backend.pre_tokenizer))
    return (
        backend.truncation is None
        and all(step["type"] == "NFC" for step in _components(backend.normalizer))
        and any(step["type"] == "ByteLevel" for step in steps)
        and all(step["type"] in ("ByteLevel", "Split", "Digits") for step in steps)
        and all(step.get("behavior") != "Removed" for step in steps)
        and all(backend.token_to_id(byte) is not None for byte in tokenizers.pre_tokenizers.ByteLevel.alphabet())
        and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    )


def _components(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of a normalizer or pre-tokenizer; of each step where it is a sequence."""
    if component is not None:
        state = json.loads(component.__getstate__())
        yield from state.get("pretokenizers", state.get("normalizers", [state]))


class _GenerationTag(jinja2.ext.Extension):
    """Ignores `{% generation %}`, with which some templates mark assistant text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(str(message).replace(BREAK, ""))


def byte_tokenizer(words: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Return a tokenizer of bytes with the tokens of Qwen3's chat format, and one token for each of `words`.

    Ids below 256 are bytes; special, markup and word tokens follow.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    added = partial(tokenizers.AddedToken, normalized=False)
    tokenizer.add_special_tokens([added(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([added(token, special=False) for token in (*MARKUP_TOKENS, *words)])
    return tokenizer
