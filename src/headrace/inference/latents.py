"""Thinking in latent space: the input embedding of a sampled token holds more than the token.

Tokens stay discrete. With logits at one position, the sampled token y and the input embeddings E:

    hybrid (arXiv 2505.18454)                                         soft (arXiv 2509.19170)
    p = softmax(logits / tau)                                         p = softmax(logits / tau)
    h = (p @ E) / ||p||                                               h = p @ E + sigma * N(0, I)
    e = E[y],  r = sigmoid(W_a e + b_a),  i = sigmoid(W_x e + b_x)    sigma = noise * RMS(E)
    a = exp(-c * softplus(-L) * r),  c = 8
    x = a * e + sqrt(1 - a**2 + 1e-8) * (i * h)                       x = h

h is the latent of y, and x is the input embedding at its position. h is rounded to float16 before it is used, so that
the trainer, which gets it from the engine, computes the same x. A latent of zeros means that x = e.

The gates (W_a, b_a, W_x, b_x, L) are a submodule of the model, in float32, and so a part of its published weights and
of its checkpoints. In a directory they are a file of their own, which other programs do not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from headrace.inference.schema import LatentParams
from headrace.transport.weights import GATES_FILE

GATES = "latent_gates"
"""The name of the submodule, and the beginning of its parameters' names."""
DECAY = 8.0
"""c."""
MIN_START, MAX_START = 0.99, 0.999
"""Bounds of a ** (1 / r) at the start: almost the plain model."""


class LatentGates(torch.nn.Module):
    """The trained gates of the hybrid form."""

    def __init__(self, size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)  # trainer and engine start with the same gates
        bound = size**-0.5  # that of a linear layer

        def uniform(*shape: int) -> Parameter:
            return Parameter((2 * torch.rand(*shape, generator=generator) - 1) * bound)

        self.recurrence_weight, self.recurrence_bias = uniform(size, size), uniform(size)  # W_a, b_a
        self.input_weight, self.input_bias = uniform(size, size), uniform(size)  # W_x, b_x
        start = MIN_START + (MAX_START - MIN_START) * torch.rand(size, generator=generator)
        self.retention = Parameter(-torch.log(start ** (-1 / DECAY) - 1))  # L

    def forward(self, embeddings: Tensor, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a, sqrt(1 - a**2) and i * h of each token, float32."""
        with torch.autocast(embeddings.device.type, enabled=False):
            e = embeddings.float()
            r = torch.sigmoid(F.linear(e, self.recurrence_weight.float(), self.recurrence_bias.float()))
            i = torch.sigmoid(F.linear(e, self.input_weight.float(), self.input_bias.float()))
            kept = torch.exp(-DECAY * F.softplus(-self.retention.float()) * r)
            return kept, torch.sqrt(1 - kept**2 + 1e-8), i * latents.float()


def add_gates(model: Any, directory: Path | None = None) -> None:
    """Add gates to a model: those of its directory, if it has any, else initial ones."""
    gates = LatentGates(model.get_input_embeddings().embedding_dim)
    if directory is not None and (directory / GATES_FILE).is_file():
        gates.load_state_dict(
            {name.removeprefix(f"{GATES}."): tensor for name, tensor in read_gates(directory).items()}
        )
    model.add_module(GATES, gates.to(model.get_input_embeddings().weight.device))


def is_gate(name: str) -> bool:
    """Return whether a parameter's name is that of a gate."""
    return name.startswith(f"{GATES}.")


def read_gates(directory: Path) -> dict[str, Tensor]:
    """Return the gates of a directory by the names of their parameters; empty if it has none."""
    path = directory / GATES_FILE
    return load_file(path) if path.is_file() else {}


def write_gates(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the gates among a model's tensors, if there are any."""
    gates = {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items() if is_gate(name)}
    if gates:
        save_file(gates, directory / GATES_FILE)


def input_embeddings(model: Any, ids: Tensor, latents: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return x of each token, and metrics of its gates: for a model with gates the hybrid form, else the soft one.

    `ids` are [tokens], and `latents` [tokens, size].
    """
    e = model.get_input_embeddings()(ids)
    is_blended = latents.any(-1, keepdim=True)
    gates = getattr(model, GATES, None)
    if gates is None:
        return torch.where(is_blended, latents.to(e.dtype), e), {}
    kept, added, gated = gates(e, latents)
    x = (kept * e.float() + added * gated).to(e.dtype)
    values = {"latents/embeds_ratio": kept.mean(-1), "latents/latent_ratio": added.mean(-1)}
    values["latents/latent_norm"] = gated.norm(dim=-1)
    return torch.where(is_blended, x, e), {name: value[is_blended[:, 0]] for name, value in values.items()}


def expected_embeddings(logits: Tensor, embeddings: Tensor, params: LatentParams) -> Tensor:
    """Return h of each row of logits, for the soft form without noise, float32."""
    p = torch.softmax(logits.float() / params.tau, -1)
    h = (p.to(embeddings.dtype) @ embeddings[: p.shape[1]]).float()
    return h / p.norm(dim=-1, keepdim=True) if params.kind == "hybrid" else h


def noise_scale(embeddings: Tensor, params: LatentParams) -> Tensor:
    """Return sigma, the standard deviation of the soft form's noise."""
    return params.noise * embeddings.detach().float().pow(2).mean().sqrt()


def gaussian_logprobs(latents: Tensor, expected: Tensor, sigma: Tensor) -> Tensor:
    """Return log N(latents; expected, sigma**2), without its constant."""
    return -(latents.float() - expected).pow(2).sum(-1) / (2 * sigma**2)
