"""Samples and tiny architectures for the trainer's tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from headrace.rollout.types import NOT_SAMPLED, Sample
from headrace.trainer.optim import Optimizer
from headrace.trainer.tokens import COMPONENTS

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
    "qwen2, sliding after the first layer": Qwen2Config(
        use_sliding_window=True, sliding_window=9, max_window_layers=1, **SIZES
    ),
    "llama": LlamaConfig(**SIZES),
    "smollm2": LlamaConfig(tie_word_embeddings=True, **SIZES),
    "mistral": MistralConfig(sliding_window=None, **SIZES),
    "mistral, sliding": MistralConfig(sliding_window=8, **SIZES),
    "gemma": GemmaConfig(head_dim=12, **SIZES),
    "gemma3, sliding and full": Gemma3TextConfig(
        head_dim=12, sliding_window=8, layer_types=["sliding_attention", "full_attention"], **SIZES
    ),
}


def write_random_model(directory: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


class Gradients(Optimizer):
    """Keeps the gradients instead of applying them."""

    def step(self, lr: float) -> float:
        self.kept = {name: parameter.grad.clone() for name, parameter in self.parameters.items()}
        self.zero_grad()
        return 0.0


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


def mixed_samples(seed: int) -> list[Sample]:
    """Rollouts whose tokens belong to none, one, several or all components."""
    rng = np.random.default_rng(seed)
    samples = random_samples(seed, 8)
    for sample in samples:
        sample.logprobs = np.where(sample.mask, -4.5 + 0.3 * rng.normal(size=len(sample)), 0.0)  # near 1/96 each
        for component in COMPONENTS:
            weights = rng.normal(1.0, 0.3, len(sample)) * (rng.random(len(sample)) < 0.6)
            sample.set_stream(f"{component}_weights", weights.tolist())
        for reference in ("ref_logprobs", "kl_logprobs"):
            sample.set_stream(reference, (-4.0 + rng.normal(size=len(sample))).tolist())
    samples[3].set_stream("rl_weights", [0.0] * len(samples[3]))
    return samples
