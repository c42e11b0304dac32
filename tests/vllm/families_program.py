"""Several families in a real vLLM, one after another: `families_program.py DIRECTORY...`, run by its interpreter.

Of each directory, `model` is sampled from, and then the version published in `weights`. Prints one JSON object per
directory: the tokens and logprobs of both, or vLLM's error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from vllm import LLM, SamplingParams, TokensPrompt

EXTENSION = "headrace.inference.vllm.worker.PublishedWeightsWorker"
PROMPTS = [list(range(n, n + 20)) for n in range(4)]
VERSION = "0-1"


def sample(engine: LLM) -> list[dict[str, Any]]:
    engine.reset_prefix_cache()
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0, temperature=1.0)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=tokens) for tokens in PROMPTS], params, use_tqdm=False)
    choices = [output.outputs[0] for output in outputs]
    return [
        {
            "tokens": list(choice.token_ids),
            "logprobs": [entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)],
        }
        for choice in choices
    ]


def run(directory: Path) -> dict[str, Any]:
    engine = LLM(
        model=str(directory / "model"),
        worker_extension_cls=EXTENSION,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
    )
    before = sample(engine)
    engine.collective_rpc("load_published", args=(str(directory / "weights" / f"v-{VERSION}"), VERSION))
    return {"before": before, "after": sample(engine)}


def main(directories: list[str]) -> None:
    for directory in directories:
        try:
            outcome = run(Path(directory))
        except Exception as error:  # vLLM has many kinds of errors for models that it does not support
            outcome = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"directory": directory, **outcome}), flush=True)
        gc.collect()
        cleanup_dist_env_and_memory()
    os._exit(0)  # vLLM leaves threads of its libraries running: at an ordinary exit one of them aborts now and then


if __name__ == "__main__":
    main(sys.argv[1:])
