"""The families that are tested with every release, and what the embedded engine does not compute of them.

`tests/models` runs each of them; this table is what it must find.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.inference.model_shape import LATENT_KEYS

LINEAR = "linear_attention"
"""What the embedded engine names when it refuses a model."""
ASSERTION = "no: fails with an assertion"
NO_TORCHVISION = "no: its code needs torchvision"


class Family(NamedTuple):
    """A family, by its `model_type`."""

    models: str
    """Models of the family that people train."""
    experts: bool = False
    engine: str = ""
    """What the embedded engine does not compute, so that it refuses the model; empty: it samples from it."""
    vllm: str = ""
    """What was not shown with vLLM 0.32 on CPUs; empty: it samples from the family and takes new weights."""


FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2, Qwen2.5"),
    "qwen3": Family("Qwen3"),
    "llama": Family("Llama 2 to 3.3, SmolLM2, Yi"),
    "mistral": Family("Mistral 7B, Mistral Nemo, Mistral Small 24B (text)"),
    "gemma2": Family("Gemma 2"),
    "gemma3_text": Family("Gemma 3 (text)"),
    "phi3": Family("Phi-3, Phi-4"),
    "olmo2": Family("OLMo 2"),
    "olmo3": Family("OLMo 3"),
    "smollm3": Family("SmolLM3"),
    "granite": Family("Granite 3"),
    "glm4": Family("GLM-4"),
    "exaone4": Family("EXAONE 4"),
    "starcoder2": Family("StarCoder2"),
    "ministral3": Family("Ministral 3"),
    "gemma4_text": Family("Gemma 4 (text)"),
    "qwen3_5_text": Family("Qwen3.5 (text)", engine=LINEAR, vllm=NO_TORCHVISION),
    "qwen3_moe": Family("Qwen3 30B-A3B, 235B-A22B", experts=True),
    "qwen2_moe": Family("Qwen1.5 and Qwen2 with experts", experts=True),
    "mixtral": Family("Mixtral", experts=True),
    "olmoe": Family("OLMoE", experts=True),
    "granitemoe": Family("Granite 3 with experts", experts=True),
    "gpt_oss": Family("gpt-oss", experts=True, vllm=ASSERTION),
    "deepseek_v3": Family(
        "DeepSeek V3, R1, Kimi K2", experts=True, engine=LATENT_KEYS, vllm="no: not shown with a tiny model"
    ),
    "glm4_moe": Family("GLM-4.5", experts=True),
    "minimax_m2": Family("MiniMax M2", experts=True, vllm="no: vLLM reads a scoring_func that its config lacks"),
    "qwen3_5_moe_text": Family("Qwen3.5 with experts (text)", experts=True, engine=LINEAR, vllm=NO_TORCHVISION),
}
