"""Where a model's files are: a local directory as it is, a hub name through the hub's own cache."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import BadInput


class ModelNotFound(BadInput):
    """No such model. The message says where it was looked for."""


def model_directory(name: str) -> Path:
    """The directory of a model given by path or hub name."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} has no config.json: it is not a Hugging Face model directory")
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelNotFound(f"model {name!r}: no such directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.txt", "*.model"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"model {name!r} is neither a local directory nor reachable on the hub: {type(error).__name__}: {error}"
        ) from error
