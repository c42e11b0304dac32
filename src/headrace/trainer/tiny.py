"""The tiny model, small enough for a laptop's CPU: Qwen3's architecture and chat format with a byte vocabulary.

First runs and tests work with it without downloads. Its weights are random; `headrace sft` trains it first.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.text.tokenizer import BYTES, SPECIAL_TOKENS, byte_tokenizer

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 320
ROLE_TOKENS = ("system", "user", "assistant")
"""Tokens for the role names of the chat format: as bytes they would be a third of a short conversation."""


def write_tiny_model(directory: Path, seed: int = 0) -> None:
    """Write a Hugging Face directory; the same seed gives the same bytes."""
    from safetensors.torch import save_file

    write_tiny_settings(directory)
    save_file(_random_weights(directory, seed), directory / "model.safetensors", metadata={"format": "pt"})


def write_tiny_settings(directory: Path) -> None:
    """Write all files but the weights, without torch: enough to render and count prompts."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(ROLE_TOKENS).save(str(directory / "tokenizer.json"))
    pad, _, stop = (BYTES + index for index in range(len(SPECIAL_TOKENS)))
    _write_json(directory / "config.json", _model_config(stop, pad))
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer)
    _write_json(
        directory / "generation_config.json", {"do_sample": True, "eos_token_id": [stop, pad], "pad_token_id": pad}
    )
    template = resources.files("headrace.trainer").joinpath("chat_template.jinja").read_text()
    (directory / "chat_template.jinja").write_text(template)


def _model_config(eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Return a config with few layers, many heads and a wide initialization: it learned to copy and reverse soonest."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 160,
        "intermediate_size": 448,
        "num_hidden_layers": 2,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.07,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }


def _random_weights(directory: Path, seed: int) -> dict[str, torch.Tensor]:
    """Return weights by the architecture's initialization, without changing the caller's RNG state."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
