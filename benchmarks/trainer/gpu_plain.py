"""The training step as people write it with Hugging Face: padded micro-batches, checkpointed layers, full logits.

As TRL runs it: parameters in float32 under autocast to bfloat16 (a frozen base in bfloat16, with PEFT's adapters in
float32), gradient checkpointing where memory is bounded, torch's own attention, logits of a whole micro-batch and the
log-softmax of one sequence at a time, fused AdamW, clipped gradients.
"""

from __future__ import annotations

import numpy as np
import torch
from benchmarks.models import qwen3_config
from benchmarks.trainer.gpu_cases import Case
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.rollout.types import Sample

DEVICE = torch.device("cuda")
SEQUENCES = 4
"""Of a padded micro-batch."""


class PlainStep:
    """A model and its optimizer."""

    def __init__(self, case: Case) -> None:
        self.case = case
        dtype = torch.bfloat16 if case.lora else torch.float32
        torch.manual_seed(0)
        with DEVICE:
            model = AutoModelForCausalLM.from_config(qwen3_config(case.size), dtype=dtype, attn_implementation="sdpa")
        if case.limit is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.config.use_cache = False
        if case.lora:
            from peft import LoraConfig, get_peft_model

            model.enable_input_require_grads()
            settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
            model = get_peft_model(model, settings)
        self.model = model.train()
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-6, weight_decay=0.0, fused=True)

    def run(self, samples: list[Sample]) -> None:
        trained = sum(int(sample.mask[1:].sum()) for sample in samples)
        for start in range(0, len(samples), SEQUENCES):
            loss = self._loss(samples[start : start + SEQUENCES]) / trained
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self, samples: list[Sample]) -> Tensor:
        tokens, mask, old = (_padded([getattr(s, name) for s in samples]) for name in ("token_ids", "mask", "logprobs"))
        seen = _padded([np.ones(len(sample), np.bool_) for sample in samples])
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(
                input_ids=tokens.long(), attention_mask=None if len(samples) == 1 else seen.long(), use_cache=False
            ).logits[:, :-1]
        labels = tokens[:, 1:].long()
        pairs = zip(logits, labels, strict=True)
        rows = [line.log_softmax(-1).gather(-1, label[:, None])[:, 0] for line, label in pairs]
        logprobs, mask = torch.stack(rows).float(), mask[:, 1:]
        if self.case.kind == "sft":
            return -(logprobs * mask).sum()
        advantages = _padded([sample.streams["advantages"] for sample in samples])[:, 1:]
        return -(((logprobs - old[:, 1:]) * mask).exp() * advantages * mask).sum()


def _padded(arrays: list[np.ndarray]) -> Tensor:
    longest = max(map(len, arrays))
    return torch.from_numpy(np.stack([np.pad(array, (0, longest - len(array))) for array in arrays])).to(DEVICE)
