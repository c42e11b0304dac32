"""What of a model cannot be trained or sampled from, by its config.json: known before anything is loaded.

A model that passes may still be refused when it is loaded: trainer and engine then compare their results with those of
the plain model.
"""

from __future__ import annotations

from typing import Any

LATENT_KEYS = "keys are compressed (multi-head latent attention)"
_STATE_SPACE = ("mamba_", "ssm_", "rwkv", "lru_")
"""Beginnings of the keys that configs have for layers with a state instead of attention."""
_RECURRENT = ("linear_", *_STATE_SPACE)
_ATTENTION = ("full_attention", "sliding_attention")


def training_obstacle(settings: dict[str, Any]) -> str | None:
    """Return what of a model the trainer does not compute; None if nothing is known."""
    kinds = [kind for kind in ("vision", "audio") if settings.get(f"{kind}_config")]
    if kinds or settings.get("text_config"):
        return (
            f"a multimodal model ({' and '.join([settings.get('model_type', 'text'), *kinds])}): models are text only"
        )
    if settings.get("is_encoder_decoder"):
        return "a model with an encoder: models are decoders"
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
