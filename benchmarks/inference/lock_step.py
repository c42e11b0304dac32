"""`model.generate`, as a contender: batches in the order of the line, padded on the left, until the longest is done.

It returns no logprobs, which spares it some work.
"""

from __future__ import annotations

import torch
from benchmarks.inference.loads import Job
from benchmarks.inference.worker import Seconds, Stopwatch
from transformers import AutoModelForCausalLM, GenerationConfig


class Contender:
    def __init__(self, model: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self._model.eval()

    @torch.inference_mode()
    def run(self, jobs: list[Job], concurrent: int) -> Seconds:
        watch = Stopwatch()
        for first in range(0, len(jobs), concurrent):
            batch = jobs[first : first + concurrent]
            width = max(len(job.prompt) for job in batch)
            padding = [width - len(job.prompt) for job in batch]
            ids = torch.tensor([[0] * pad + job.prompt for pad, job in zip(padding, batch, strict=True)])
            mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
            sampling = GenerationConfig(
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=0,
                max_new_tokens=max(job.completion for job in batch),
            )
            output = self._model.generate(ids, attention_mask=mask, generation_config=sampling)
            assert output.shape[1] == width + max(job.completion for job in batch)
        return watch.read()
