"""A model directory's tokenizer on `tokenizers` and `jinja2` alone.

transformers' own class takes seconds to import and pulls in torch; the orchestrator can afford neither.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from headrace.errors import BadInput

COMPOSED = 4
"""Characters that NFC makes one of, at most."""
LONG = 1 << 13
"""Characters of a text, or tokens, that take so long that other threads must go on meanwhile."""


class TokenizerError(BadInput):
    """The model directory has no usable tokenizer. The message says what is missing."""


class Tokenizer:
    """The part of a Hugging Face tokenizer that rendering needs, `renderers`' bring-your-own protocol included."""

    def __init__(self, directory: str | Path) -> None:
        root = Path(directory)
        file = root / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                "no such file: a model directory needs its tokenizer beside the weights",
                file=file,
                fix="Save it there with AutoTokenizer.from_pretrained(...).save_pretrained(...).",
            )
        self.name_or_path = str(directory)
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise TokenizerError(f"not a tokenizer: {error}", file=file) from error
        settings = _read_json(root / "tokenizer_config.json")
        self.chat_template = _chat_template(root, settings)
        self.eos_token: str | None = _token_text(settings.get("eos_token"))
        self.bos_token: str | None = _token_text(settings.get("bos_token"))
        self.unk_token: str | None = _token_text(settings.get("unk_token"))
        self.pad_token: str | None = _token_text(settings.get("pad_token"))
        self.vocab_size: int = self.backend.get_vocab_size()
        self._compiled: jinja2.Template | None = None

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of(self.eos_token)

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of(self.bos_token)

    @property
    def unk_token_id(self) -> int | None:
        return self._id_of(self.unk_token)

    @property
    def control_tokens(self) -> dict[int, str]:
        """Tokens of the chat format itself, which no text should spell, by id."""
        added = self.backend.get_added_tokens_decoder()
        return {token: entry.content for token, entry in added.items() if entry.special and token != self.unk_token_id}

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return list(self._encoding(text, add_special_tokens).ids)

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        if len(text) < LONG:
            return self.backend.encode(text, add_special_tokens=add_special_tokens)
        [encoding] = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)  # lets go of the GIL
        return encoding

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if len(ids) < LONG:
            return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))
        [text] = self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)  # lets go of the GIL
        return str(text)

    def min_tokens(self, text: str) -> int:
        """Tokens that a text surely has, told by its length alone; 0 where the tokenizer may leave characters out."""
        if self._longest_token is None:
            return 0
        return (len(text) if text.isascii() else len(text) // COMPOSED) // self._longest_token

    @functools.cached_property
    def _longest_token(self) -> int | None:
        """The most characters that one token stands for; None where that may be any number.

        A token of a byte-level vocabulary is written with a character for each byte.
        """
        if not _keeps_every_character(self.backend):
            return None
        return max(map(len, self.backend.get_vocab()))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            found = self.backend.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        if isinstance(ids, int):
            return self.backend.id_to_token(ids)
        return [self.backend.id_to_token(i) for i in ids]

    def __call__(
        self, text: str, add_special_tokens: bool = False, return_offsets_mapping: bool = False, **_: Any
    ) -> dict[str, Any]:
        encoding = self._encoding(text, add_special_tokens)
        result: dict[str, Any] = {"input_ids": list(encoding.ids), "attention_mask": [1] * len(encoding.ids)}
        if return_offsets_mapping:
            result["offset_mapping"] = list(encoding.offsets)
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
        """Render through the model's own Jinja template, as transformers does."""
        text = self._template().render(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token or "",
            eos_token=self.eos_token or "",
            unk_token=self.unk_token or "",
            pad_token=self.pad_token or "",
            **kwargs,
        )
        if not tokenize:
            return text
        ids = self.encode(text)
        return {"input_ids": ids} if return_dict else ids

    def _template(self) -> jinja2.Template:
        if self._compiled is None:
            if self.chat_template is None:
                raise TokenizerError(
                    "the model has no chat template",
                    file=self.name_or_path,
                    fix="Add chat_template.jinja, or `chat_template` in tokenizer_config.json.",
                )
            environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
            )
            environment.filters["tojson"] = _to_json
            environment.globals["raise_exception"] = _raise_exception
            environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
            self._compiled = environment.from_string(self.chat_template)
        return self._compiled

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)


@functools.lru_cache
def shared_tokenizer(directory: Path) -> Tokenizer:
    """Return this process's one tokenizer of a directory: a large vocabulary takes most of a second to read."""
    return Tokenizer(directory)


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _chat_template(root: Path, settings: dict[str, Any]) -> str | None:
    file = root / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _token_text(token: Any) -> str | None:
    """Special tokens are written as text, or as a record with the text in `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """transformers' `tojson`: unlike jinja2's own, it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _keeps_every_character(backend: tokenizers.Tokenizer) -> bool:
    """Whether each character of a text is sure to be in one of its tokens: a whole byte-level vocabulary, no more."""
    steps = list(_parts(backend.pre_tokenizer))
    return (
        backend.truncation is None
        and all(step["type"] == "NFC" for step in _parts(backend.normalizer))
        and any(step["type"] == "ByteLevel" for step in steps)
        and all(step["type"] in ("ByteLevel", "Split", "Digits") for step in steps)
        and all(step.get("behavior") != "Removed" for step in steps)
        and all(backend.token_to_id(byte) is not None for byte in tokenizers.pre_tokenizers.ByteLevel.alphabet())
        and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    )


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """The settings of a part of a tokenizer; of each step where it is a sequence."""
    if component is not None:
        state = json.loads(component.__getstate__())
        yield from state.get("pretokenizers", state.get("normalizers", [state]))


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text in some templates; for rendering it means nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
