"""transformers' continuous batching, as a contender: as it is, or with an attention function that suits a CPU."""

from __future__ import annotations

import torch
from benchmarks.inference.loads import Job
from benchmarks.inference.paged_attention import replace_attention
from benchmarks.inference.worker import Seconds, Stopwatch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from headrace.inference.embedded.cpu.weight_layout import lay_out_for_small_batches

PAGE = 32
STEP_TOKENS = 2048


class Contender:
    def __init__(self, model: str, *, max_model_len: int, replaced: bool, by_column: bool = False) -> None:
        """`by_column` lays out the weights as the embedded engine does."""
        logging.set_verbosity_error()
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self._model.eval()
        if replaced:
            replace_attention(self._model)
        if by_column:
            lay_out_for_small_batches(self._model)
        self._pages = -(-max_model_len // PAGE)

    def run(self, jobs: list[Job], concurrent: int) -> Seconds:
        sampling = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=2 * self._pages * concurrent,
            max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=concurrent,
            max_blocks_per_request=0,
            return_logprobs=True,
        )
        manager = self._model.init_continuous_batching(generation_config=sampling, continuous_batching_config=batching)
        manager.start()
        watch = Stopwatch()
        for job in jobs:
            manager.add_request(job.prompt, max_new_tokens=job.completion)
        sampled = 0
        for _ in jobs:
            while (result := manager.get_result(timeout=1)) is None:
                assert manager.is_running(), "the manager's thread has died"
            sampled += len(result.generated_tokens)
        seconds = watch.read()
        manager.stop(block=True)
        assert sampled == sum(job.completion for job in jobs)
        return seconds
