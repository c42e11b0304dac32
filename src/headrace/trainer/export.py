"""Export of a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from headrace.errors import BadInput
from headrace.text.hub import model_directory
from headrace.trainer import checkpoint
from headrace.trainer.learner import MODEL, prefixed
from headrace.trainer.model import PackedModel
from headrace.trainer.ranks import Ranks
from headrace.transport.adapter import CONFIG, is_adapter, read_config
from headrace.transport.files import write_directory


def export(
    source: Path, target: Path, dtype: str = "auto", *, adapter_only: bool = False, trust_remote_code: bool = False
) -> None:
    """Write the model of a complete checkpoint; dtype `auto` is that of the model before training.

    An adapter is merged into its base model, or with `adapter_only` written by itself.
    """
    checkpoint.read_state(source)
    files = source / checkpoint.MODEL
    if adapter_only and not is_adapter(files):
        raise BadInput("has no adapter: the run trained all parameters", key="--adapter", value=source)
    model = _model(files, trust_remote_code)
    checkpoint.load_tensors(source, prefixed(MODEL, model.learned()))
    if adapter_only:
        write_directory(target, model.save_for_engine)
        return
    if dtype == "auto":
        settings = json.loads((files / "config.json").read_text())
        dtype = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    write_directory(target, lambda draft: model.save(draft, getattr(torch, dtype)))


def _model(files: Path, trust_remote_code: bool) -> PackedModel:
    """Return the model to load a checkpoint's tensors into; with an adapter, its base model is loaded."""
    ranks = Ranks(torch.device("cpu"))  # GPUs may be in use
    if not is_adapter(files):
        return PackedModel(files, ranks, load=False, trust_remote_code=trust_remote_code)
    adapter = read_config(files / CONFIG)
    if adapter.base_model_name_or_path is None:
        raise BadInput("has no base_model_name_or_path", file=files / CONFIG)
    lora = {name: getattr(adapter, name) for name in ("r", "target_modules", "use_rslora")}
    lora["alpha"] = adapter.lora_alpha
    base = model_directory(adapter.base_model_name_or_path)
    return PackedModel(base, ranks, lora=lora, trust_remote_code=trust_remote_code)
