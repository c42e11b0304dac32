"""vLLM's own engine on a GPU, as a contender: its offline interface, with no server in front.

It runs in vLLM's environment and imports nothing of ours but the loads. What vLLM does by itself stays as it is, with
two exceptions in its favour: CUDA graphs reach as far as the load does (by default up to 512 requests), and nothing
is detokenized.
"""

from __future__ import annotations

from typing import Any

from benchmarks.inference.loads import Job
from benchmarks.inference.worker import Seconds, Stopwatch

from vllm import LLM, SamplingParams


class Contender:
    """The engine is made when it is first asked, so that processes can import beside each other."""

    def __init__(self, model: str, *, max_model_len: int, concurrent: int, kv_bytes: int) -> None:
        self._settings: dict[str, Any] = {
            "model": model,
            "dtype": "bfloat16",
            "max_model_len": max_model_len,
            "max_num_seqs": concurrent,
            "kv_cache_memory_bytes": kv_bytes,
            "gpu_memory_utilization": 0.5,  # only compared with what is free: the line above is what counts
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "attention_config": {"backend": "FLASH_ATTN", "flash_attn_version": 3},
            "compilation_config": {"cudagraph_capture_sizes": powers_of_two(concurrent)},
        }
        self._engine: LLM | None = None

    def run(self, jobs: list[Job], concurrent: int) -> Seconds:
        watch = Stopwatch()
        if self._engine is None:
            self._engine = LLM(**self._settings)
        if not jobs:
            return watch.read()
        outputs = self._engine.generate(
            [{"prompt_token_ids": job.prompt} for job in jobs],
            [SamplingParams(max_tokens=job.completion, ignore_eos=True, logprobs=0, detokenize=False) for job in jobs],
            use_tqdm=False,
        )
        seconds = watch.read()
        for job, output in zip(jobs, outputs, strict=True):
            assert len(output.outputs[0].logprobs) == job.completion
        return seconds


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and the largest: each graph costs about a second of the start."""
    return sorted({min(1 << exponent, most) for exponent in range(most.bit_length() + 1)})
