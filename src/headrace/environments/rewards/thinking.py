"""Thinking length of completions in the strict format, in words or in tokens of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.environments.strict_format import format_of
from headrace.errors import BadInput
from headrace.text.tokenizer import shared_tokenizer

TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]

Length = Callable[[str], int]


def thinking_lengths(texts: Sequence[str], data: Sequence[Mapping[str, Any]], length: Length) -> list[int | None]:
    """Return the thinking length of each completion; None for a malformed one, which has none."""
    parsed = (format_of(row).parse(text) for text, row in zip(texts, data, strict=True))
    return [None if completion is None else length(completion.thinking) for completion in parsed]


def words_in(text: str) -> int:
    return len(text.split())


def length_in(tokenizer_name: str | None, cache_dir: str | Path | None = None) -> Length:
    """Return a function that counts tokens without special ones, or words if there is no tokenizer."""
    if not tokenizer_name:
        return words_in
    tokenizer = shared_tokenizer(tokenizer_directory(tokenizer_name, cache_dir))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def tokenizer_directory(name: str, cache_dir: str | Path | None = None) -> Path:
    """Return the directory of a tokenizer: as given, in `cache_dir`, or of a model downloaded there from the hub."""
    folders = [Path(name).expanduser(), *([Path(cache_dir).expanduser() / name] if cache_dir is not None else [])]
    for folder in folders:
        if folder.is_dir():
            return folder
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        fact = f"no such directory; looked for {' and '.join(map(str, folders))}"
        raise BadInput(fact, key="tokenizer_name", value=name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, cache_dir=cache_dir, allow_patterns=TOKENIZER_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise BadInput(
            f"neither a directory ({' or '.join(map(str, folders))}) nor a model on the hub: "
            f"{type(error).__name__}: {error}",
            key="tokenizer_name",
            value=name,
        ) from error
