"""A fixed batch and two models, for numbers that another library computed of them. Nothing depends on the machine."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.training_samples import ARCHITECTURES

COEF, EPSILON = 0.3, 0.2
POLICY, REFERENCE = 1, 2
"""Seeds of the models."""
PROMPT = [5, 17, 40]
COMPLETIONS = [[8, 9, 60, 33], [71, 2, 8], [90, 90, 11, 4, 56], [3]]
ADVANTAGES = [1.5, -0.5, -1.25, 0.25]
SAMPLED = [-4.4, -4.9, -4.6, -4.2, -5.1]
"""Logprobs of sampling, the same in every completion."""


def write_model(directory: Path, seed: int) -> Path:
    """Uniform parameters by numpy, whose bits are the same on every machine."""
    rng = np.random.default_rng(seed)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES["qwen3"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.uniform(-0.6, 0.6, parameter.shape).astype(np.float32)))
    model.save_pretrained(directory)
    return directory
