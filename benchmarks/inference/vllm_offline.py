"""vLLM's own engine on a CPU, as a contender: in this process, without a server in front.

It runs in vLLM's environment and imports nothing of ours but the loads.
"""

from __future__ import annotations

from benchmarks.inference.loads import Job
from benchmarks.inference.worker import Seconds, Stopwatch

from vllm import LLM, SamplingParams

KV_CACHE_BYTES = 1 << 30


class Contender:
    def __init__(self, model: str, *, max_model_len: int, concurrent: int) -> None:
        self._engine = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            max_model_len=max_model_len,
            max_num_seqs=concurrent,
            disable_log_stats=True,
        )

    def run(self, jobs: list[Job], concurrent: int) -> Seconds:
        watch = Stopwatch()
        outputs = self._engine.generate(
            [{"prompt_token_ids": job.prompt} for job in jobs],
            [SamplingParams(max_tokens=job.completion, ignore_eos=True, logprobs=0, detokenize=False) for job in jobs],
            use_tqdm=False,
        )
        seconds = watch.read()
        assert [len(output.outputs[0].token_ids) for output in outputs] == [job.completion for job in jobs]
        return seconds
