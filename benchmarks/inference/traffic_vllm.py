"""vLLM called directly with the same traffic: its asynchronous engine in this process, no server, no new weights.

    python -m benchmarks.inference.traffic_vllm MODEL OPTIONS TRAFFIC...

Runs in vLLM's environment and prints one line of JSON for each kind of traffic. Prefix caching is on, as it is by
default.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.inference.traffic_jobs import TRAFFIC, Conversation
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from vllm import SamplingParams

VOCAB = 150_000


async def measure(engine: AsyncLLM, name: str, options: dict[str, Any], numbers: Iterator[int]) -> dict[str, float]:
    traffic = TRAFFIC[name]
    conversations = traffic.steady_conversations(VOCAB, options["max_running"])
    sampled = [0]

    async def converse(turns: Conversation) -> None:
        tokens: list[int] = []
        for turn in turns:
            tokens = tokens + turn.tokens
            params = SamplingParams(
                max_tokens=turn.completion,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,  # its fastest: nothing is sent for each token
                seed=next(numbers) if traffic.seeded else None,
            )
            async for output in engine.generate({"prompt_token_ids": tokens}, params, str(next(numbers))):
                new = output.outputs[0].token_ids
                assert len(output.outputs[0].logprobs) == len(new)
                sampled[0] += len(new)
                tokens = tokens + list(new)

    async def keep_asking() -> None:
        while True:
            await converse(next(conversations))

    def sampled_so_far() -> int:
        """Return the sampled tokens, those of requests that are not finished included."""
        states = engine.output_processor.request_states.values()
        return sampled[0] + sum(state.detokenizer.num_output_tokens() for state in states)

    tasks = [asyncio.create_task(keep_asking()) for _ in range(options["in_flight"])]
    await asyncio.sleep(options["warm_up_s"])
    before, begun = sampled_so_far(), time.perf_counter()
    await asyncio.sleep(options["seconds"])
    rate = (sampled_so_far() - before) / (time.perf_counter() - begun)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {"tokens_per_second": rate}


async def run(model: str, options: dict[str, Any], names: list[str]) -> None:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="bfloat16",
            max_model_len=options["max_model_len"],
            max_num_seqs=options["max_running"],
            kv_cache_memory_bytes=options["kv_bytes"],
            gpu_memory_utilization=0.5,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            attention_config={"backend": "FLASH_ATTN", "flash_attn_version": 3},
        )
    )
    numbers = itertools.count()  # ids of requests, and seeds
    try:
        for name in names:
            print(json.dumps(await measure(engine, name, options, numbers)), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]))
