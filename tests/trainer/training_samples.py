"""Samples and tiny architectures for the trainer's tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from headrace.rollout.types import NOT_SAMPLED, Sample

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(head_dim=12, tie_word_embeddings=True, **SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(sliding_window=None, **SIZES),
    "gemma": GemmaConfig(head_dim=12, **SIZES),
}


def write_random_model(directory: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def make_sample(
    tokens: Sequence[int], prompt: int, *, temperature: float = 1.0, version: int = 0, **streams: Sequence[float]
) -> Sample:
    """A prompt and a sampled completion; the logprobs are those of a coin per token."""
    mask = np.arange(len(tokens)) >= prompt
    sample = Sample(
        np.array(tokens), mask, np.where(mask, -0.7, 0.0), np.where(mask, version, NOT_SAMPLED), prompt, temperature
    )
    for name, values in streams.items():
        sample.set_stream(name, list(values))
    return sample


def random_samples(seed: int, count: int, vocabulary: int = 96) -> list[Sample]:
    """Rollouts of mixed lengths with an advantage each; pairs share their prompt, and temperatures differ."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(count):
        if index % 2 == 0:
            prompt = rng.integers(0, vocabulary, rng.integers(2, 12)).tolist()
        tokens = [*prompt, *rng.integers(0, vocabulary, rng.integers(1, 9)).tolist()]
        advantages = np.where(np.arange(len(tokens)) >= len(prompt), rng.normal(), 0.0)
        temperature = 0.5 + 0.5 * (index % 3)
        samples.append(make_sample(tokens, len(prompt), temperature=temperature, advantages=advantages.tolist()))
    return samples
