"""Sizes of a model, and what of it is not supported, from its config.json and the headers of its safetensors files.

Neither torch nor weights are loaded. A model that passes may still be refused when it is loaded: trainer and engine
then compare their results with those of the plain model.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.rollout.schema import DamagedFile
from headrace.text.hub import read_settings
from headrace.transport.files import check_regular

ALL_LINEAR, EXPERTS = "all-linear", "experts"
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json with the number of experts in a layer."""
CHOSEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
"""Keys with the number of experts that a token takes."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a decoder's layers, with the names of its config."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    """Width of what a token uses: of a model with experts, that of its chosen and shared ones together."""
    vocab_size: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    """Width of one expert."""

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of a layer's linear maps, by the names that most models give them."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            **{"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)},
            **{"o_proj": (queries, hidden), "gate_proj": (hidden, inner), "up_proj": (hidden, inner)},
            "down_proj": (inner, hidden),
        }


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model, and the number of its parameters."""

    sizes: LayerSizes
    parameters: int
    positions: int | None = None
    """The model's longest sequence, if its config has it."""

    @property
    def expert_parameters(self) -> int:
        """The parameters of all experts, of which a token uses a few."""
        sizes = self.sizes
        return 3 * sizes.num_hidden_layers * sizes.num_experts * sizes.hidden_size * sizes.expert_size

    def kv_bytes(self, itemsize: int) -> int:
        """Return the bytes of keys and values per token."""
        sizes = self.sizes
        return 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim * itemsize

    def adapter_parameters(self, r: int, target_modules: str | Sequence[str] = ALL_LINEAR) -> int:
        """Estimate the parameters of a LoRA adapter; of a model with experts, its other layers are attention."""
        targets = [target_modules] if isinstance(target_modules, str) else target_modules
        names = {target.rpartition(".")[2] for target in targets}
        sizes, layers = self.sizes, self.sizes.linear_layers()
        if sizes.num_experts:
            layers = {name: layers[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        adapted = [size for name, size in layers.items() if name in names] or list(layers.values())
        experts = sizes.num_experts * (2 * sizes.hidden_size + 3 * sizes.expert_size) if EXPERTS in names else 0
        return r * sizes.num_hidden_layers * (sum(map(sum, adapted)) + experts)


def read_shape(directory: Path) -> ModelShape | None:
    """Return the shape of a Hugging Face model; None if its config.json has other keys than most models."""
    settings = read_settings(directory / "config.json")
    config: dict[str, Any] = settings.get("text_config") or settings
    try:
        heads = config["num_attention_heads"]
        sizes = LayerSizes(
            hidden_size=int(config["hidden_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            num_attention_heads=int(heads),
            num_key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            **feed_forward_sizes(config),
        )
    except (KeyError, TypeError, ValueError):
        return None
    ties = bool(settings.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    parameters = _count_stored(directory, ties)
    if parameters is None:
        matrices = sum(inputs * outputs for inputs, outputs in sizes.linear_layers().values())
        others = sizes.num_experts - sizes.experts_per_token  # experts that a token does not take; and the router
        experts = sizes.hidden_size * (3 * others * sizes.expert_size + sizes.num_experts)
        tables = sizes.vocab_size * sizes.hidden_size * (1 if ties else 2) + sizes.hidden_size
        parameters = tables + sizes.num_hidden_layers * (matrices + 2 * sizes.hidden_size + experts)
    return ModelShape(sizes, parameters, config.get("max_position_embeddings"))


def feed_forward_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the width of the feed-forward layers that a token uses, and the sizes of experts if there are any.

    Layers without experts, which some models begin with, count as if they had them: they are about as wide.
    """
    dense = int(config.get("intermediate_size") or 4 * config["hidden_size"])
    experts = next((int(config[key]) for key in EXPERT_KEYS if config.get(key)), 0)
    if experts < 2:
        return {"intermediate_size": dense}
    width = int(config.get("moe_intermediate_size") or dense)
    chosen = next((int(config[key]) for key in CHOSEN_KEYS if config.get(key)), 1)
    shared = int(config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width)
    sizes = {"num_experts": experts, "experts_per_token": chosen, "expert_size": width}
    return {"intermediate_size": chosen * width + shared, **sizes}


def adapter_share(directory: Path, r: int, target_modules: str | Sequence[str]) -> float | None:
    """Return the parameters of a LoRA adapter per parameter of the model in `directory`; None if that is unknown."""
    shape = read_shape(directory)
    return None if shape is None else shape.adapter_parameters(r, target_modules) / shape.parameters


def _count_stored(directory: Path, ties: bool) -> int | None:
    """Return the number of parameters in the directory's files, tied ones once; None if there are no such files."""
    files = sorted(directory.glob("*.safetensors"))
    shapes: dict[str, list[int]] = {}
    try:
        for file in files:
            shapes |= {name: entry["shape"] for name, entry in _read_header(file)[0].items() if name != "__metadata__"}
    except (ValueError, struct.error):  # damaged, or the pointer of a large file that was not fetched
        return None
    if ties and any("embed" in name for name in shapes):
        shapes.pop("lm_head.weight", None)
    return sum(map(math.prod, shapes.values())) if files else None


def check_weights(directory: Path) -> None:
    """Raise `DamagedFile` for a file of weights that was cut or is something else; only headers are read."""
    for file in sorted(directory.glob("*.safetensors")):
        try:
            header, size = _read_header(file)
            header.pop("__metadata__", None)
            size += max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (KeyError, TypeError, ValueError, struct.error) as error:
            raise DamagedFile(f"not a safetensors file: {error}", file=file) from error
        if size != file.stat().st_size:
            raise DamagedFile(f"{file.stat().st_size:,} bytes instead of {size:,}", file=file)


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where its tensors begin."""
    check_regular(file)
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > file.stat().st_size:
            raise ValueError("its header is longer than the file")
        return msgspec.json.decode(stream.read(length), type=dict[str, Any]), 8 + length


LATENT_KEYS = "keys are compressed (multi-head latent attention)"
TESTED_FIX = "`headrace models` shows what works."
VLLM_FIX = 'Set inference.engine = "vllm".'
_STATE_SPACE = ("mamba_", "ssm_", "rwkv", "lru_")
"""Beginnings of the keys that configs have for layers with a state instead of attention."""
_RECURRENT = ("linear_", *_STATE_SPACE)
_ATTENTION = ("full_attention", "sliding_attention")


def decoder_obstacle(settings: dict[str, Any]) -> str | None:
    """Return why a model is not a decoder of text, which every engine and the trainer need; None if it is one."""
    kinds = [kind for kind in ("vision", "audio") if settings.get(f"{kind}_config")]
    if kinds or settings.get("text_config"):
        return (
            f"a multimodal model ({' and '.join([settings.get('model_type', 'text'), *kinds])}): models are text only"
        )
    if settings.get("is_encoder_decoder"):
        return "a model with an encoder: models are decoders"
    return None


def training_obstacle(settings: dict[str, Any]) -> str | None:
    """Return what of a model the trainer does not compute; None if nothing is known."""
    if (obstacle := decoder_obstacle(settings)) is not None:
        return obstacle
    if settings.get("attention_chunk_size"):
        return "has chunked attention, which packed training does not compute"
    if not settings.get("layer_types") and (keys := _keys_of(settings, _STATE_SPACE)):
        return f"has layers with a state ({keys[0]}), which packed training does not compute"
    return None


def embedded_obstacle(settings: dict[str, Any]) -> str | None:
    """Return what of a model the embedded engine does not compute; None if nothing is known."""
    others = sorted({str(kind) for kind in settings.get("layer_types") or ()} - {*_ATTENTION})
    if not others and not settings.get("layer_types"):
        others = _keys_of(settings, _RECURRENT)[:1]
    if others:
        return f"has {', '.join(others)} layers; the embedded engine supports full and sliding-window attention"
    if settings.get("kv_lora_rank"):
        return f"its {LATENT_KEYS}, which the embedded engine does not cache"
    return None


def _keys_of(settings: dict[str, Any], beginnings: tuple[str, ...]) -> list[str]:
    return sorted(key for key, value in settings.items() if value and key.startswith(beginnings))
