"""A tiny random model of every family that people train, with what makes the family special switched on."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128},
    **{"initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DENSE: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"rope_parameters": {**ROPE, "original_max_position_embeddings": 64}},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3_text": MIXED,
    "phi3": {},
    "olmo2": {},
    "olmo3": MIXED,
    "smollm3": {},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "glm4": {},
    "exaone4": MIXED,
    "starcoder2": {"sliding_window": 6},
    "ministral3": {},
    "gemma4_text": {**MIXED, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
    "qwen3_5_text": LINEAR,
}
CHOSEN = {"num_experts_per_tok": 2}
SMALL = {**CHOSEN, "num_experts": 4, "moe_intermediate_size": 16}
LOCAL = {**CHOSEN, "num_local_experts": 4}
GROUPED = {
    **{**CHOSEN, "n_routed_experts": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1},
}
COMPRESSED = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": SMALL,
    "qwen2_moe": {**SMALL, "shared_expert_intermediate_size": 16},
    "mixtral": LOCAL,
    "olmoe": SMALL,
    "granitemoe": {**LOCAL, "logits_scaling": 4.0},
    "gpt_oss": {**LOCAL, **MIXED},
    "deepseek_v3": {**GROUPED, **COMPRESSED},
    "glm4_moe": GROUPED,
    "minimax_m2": {**LOCAL, "rotary_dim": 8},
    "qwen3_5_moe_text": {**SMALL, **LINEAR, "shared_expert_intermediate_size": 16},
}
FAMILIES = DENSE | EXPERTS


def make_model(family: str, seed: int = 0, **sizes: Any) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **sizes}))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zero at first: then its place in files would not matter
            buffer.normal_(std=0.1)
    return model.eval()


def write_model(directory: Path, family: str, seed: int = 0, **sizes: Any) -> Path:
    make_model(family, seed, **sizes).save_pretrained(directory)
    return directory
