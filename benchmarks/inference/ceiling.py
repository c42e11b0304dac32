"""The matrix products of a load and nothing else, as a contender: what no engine on these linear layers can pass.

Every distinct prompt goes through the layers once, many tokens at a time; every sampled token goes through the layers
and the head in a batch of as many as run at a time. Weights are tried by row and by column, and the faster counts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from benchmarks.inference.loads import Job
from benchmarks.inference.worker import Seconds, Stopwatch
from transformers import AutoModelForCausalLM

PROMPT_TOKENS = 512
"""Tokens of prompts that are multiplied at a time."""
AT_LEAST_SECONDS = 0.3


class Contender:
    def __init__(self, model: str) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._head = _layouts([loaded.get_output_embeddings()])
        linear = [module for module in loaded.base_model.modules() if isinstance(module, torch.nn.Linear)]
        self._body = _layouts(linear)

    @torch.inference_mode()
    def run(self, jobs: list[Job], concurrent: int) -> Seconds:
        prompts = sum(map(len, {tuple(job.prompt) for job in jobs})) / PROMPT_TOKENS
        steps = sum(job.completion for job in jobs) / concurrent
        prefill, decode, head = (
            _fastest(self._body, PROMPT_TOKENS),
            _fastest(self._body, concurrent),
            _fastest(self._head, concurrent),
        )
        return Seconds(
            prompts * prefill.wall + steps * (decode.wall + head.wall),
            prompts * prefill.cpu + steps * (decode.cpu + head.cpu),
        )


def _layouts(modules: list[torch.nn.Linear]) -> list[list[torch.Tensor]]:
    """The weights by row, and by column."""
    weights = [module.weight.detach() for module in modules]
    return [weights, [weight.t().contiguous().t() for weight in weights]]


def _fastest(layouts: list[list[torch.Tensor]], rows: int) -> Seconds:
    return min(_seconds(weights, rows) for weights in layouts)


def _seconds(weights: list[torch.Tensor], rows: int) -> Seconds:
    """For that many rows times each of the weights."""
    inputs = {width: torch.randn(rows, width) for width in {weight.shape[1] for weight in weights}}
    for weight in weights:
        F.linear(inputs[weight.shape[1]], weight)
    rounds, watch = 0, Stopwatch()
    while watch.read().wall < AT_LEAST_SECONDS:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)
        rounds += 1
    return Seconds(*(value / rounds for value in watch.read()))
