"""How long a completion thinks: the words or tokens between its tags, where it keeps to the strict format at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.environments.hackable.samples import format_of
from headrace.errors import BadInput
from headrace.text.tokenizer import shared_tokenizer

FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
"""All that counting needs of a model."""

Length = Callable[[str], int]


def thinking_lengths(
    completions: Sequence[str], infos: Sequence[Mapping[str, Any]], length: Length
) -> list[int | None]:
    """For each completion the length of its thoughts; None if it is malformed, and has no such length."""
    parsed = (format_of(info).parse(text) for text, info in zip(completions, infos, strict=True))
    return [None if completion is None else length(completion.thinking) for completion in parsed]


def words_in(text: str) -> int:
    return len(text.split())


def length_in(tokenizer_name: str | None, cache_dir: str | Path | None = None) -> Length:
    """Counts tokens of a model's tokenizer, special ones left out; words without one, or with an empty name."""
    if not tokenizer_name:
        return words_in
    tokenizer = shared_tokenizer(tokenizer_directory(tokenizer_name, cache_dir))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def tokenizer_directory(name: str, cache_dir: str | Path | None = None) -> Path:
    """Where a tokenizer is: a directory, one in `cache_dir`, or a model on the hub, which is then kept there."""
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
        return Path(snapshot_download(name, cache_dir=cache_dir, allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise BadInput(
            f"neither a directory ({' or '.join(map(str, folders))}) nor a model that the hub gives: "
            f"{type(error).__name__}: {error}",
            key="tokenizer_name",
            value=name,
        ) from error
