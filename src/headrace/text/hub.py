"""The directory of a model: a local path, or a hub name in the cache of `huggingface_hub`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import BadInput
from headrace.rollout.schema import DamagedFile


def read_settings(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model; raises `DamagedFile` for anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except ValueError as error:
        raise DamagedFile(f"not readable: {error}", file=path) from error


class ModelNotFound(BadInput):
    """A model that is neither a local directory nor on the hub."""


FILES = ["*.json", "*.jinja", "*.safetensors", "*.txt", "*.model"]
"""The files of a model that are downloaded from the hub."""


def model_directory(name: str, key: str = "model") -> Path:
    """Return the directory of a model given by path or hub name, downloaded if needed; errors name `key`."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound("no config.json in it: not a Hugging Face model directory", key=key, value=path)
        read_settings(path / "config.json")
        return path
    if not _may_be_on_hub(name):
        fact = "no such directory, and not the name of a model on the hub"
        raise ModelNotFound(fact, key=key, value=name, fix="Give an existing directory, or OWNER/NAME on the hub.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        fact = f"neither a local directory nor reachable on the hub: {type(error).__name__}: {error}"
        fix = "Give an existing directory, or the name of a model on the hub."
        raise ModelNotFound(fact, key=key, value=name, fix=fix) from error


def cached_model_directory(name: str, key: str = "model", *, fetch_later: bool = False) -> Path | None:
    """Return the directory of a model that is local or cached; None if it must be downloaded.

    In offline mode a missing model is an error, unless it will be downloaded later (`fetch_later`).
    """
    if Path(name).expanduser().is_dir() or not _may_be_on_hub(name):
        return model_directory(name, key)
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(name, allow_patterns=FILES, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return model_directory(name, key) if constants.HF_HUB_OFFLINE and not fetch_later else None
    return directory if (directory / "tokenizer.json").is_file() else None


def _may_be_on_hub(name: str) -> bool:
    return not (Path(name).is_absolute() or name.startswith((".", "~"))) and name.count("/") == 1
