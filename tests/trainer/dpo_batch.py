"""A fixed batch of preference pairs and two tiny models, the same on every machine."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.training_samples import ARCHITECTURES

POLICY, REFERENCE = 1, 2
"""Seeds of the two models."""
PAIRS = [
    {"prompt_ids": [5, 6, 7], "chosen_ids": [10, 11, 12, 1], "rejected_ids": [13, 1]},
    {"prompt_ids": [5, 6, 7], "chosen_ids": [10, 14, 1], "rejected_ids": [10, 11, 15, 16, 17, 1]},
    {"prompt_ids": [20, 21, 22, 23, 24, 25], "chosen_ids": [30], "rejected_ids": [31, 32, 33]},
    {"prompt_ids": [40], "chosen_ids": [41, 42, 43, 44, 45, 46, 47, 1], "rejected_ids": [48, 49, 50, 1]},
]


def write_model(directory: Path, seed: int) -> Path:
    """Write a model whose parameters are numpy's: torch's generators differ between processors."""
    rng = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["qwen3"])
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            values = 0.15 * rng.standard_normal(parameter.shape)
            parameter.copy_(torch.from_numpy(values + (parameter.dim() == 1)))
    model.save_pretrained(directory)
    return directory
