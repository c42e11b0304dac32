"""Published weights in a real vLLM: `weights_program.py DIRECTORY HEAD CARRIER`, in an interpreter that has vLLM.

Starts an engine on a random model, whose head is `tied` to its embeddings or `own`, brings it to a version from files
and to others over the link from a process that plays the trainer, and after each compares its logprobs with those of
transformers on the same weights. What cannot be loaded must leave everything as it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from headrace.rollout.version import Version
from headrace.transport.weights import WeightStore, read_marker
from tests.inference.weights_sender import SenderProcess
from vllm import LLM, SamplingParams, TokensPrompt

EXTENSION = "headrace.inference.vllm.worker.PublishedWeightsWorker"
GPU = torch.cuda.is_available()
TOLERANCE = 0.2 if GPU else 1e-4
"""On a GPU vLLM computes in bfloat16; other weights are off by several units."""
TRAINER_PYTHON = os.environ.get("HEADRACE_TRAINER_PYTHON", sys.executable)
"""The interpreter of the process that publishes: vLLM's environment lacks some of its packages."""
PUBLISH = """
import shutil, sys
from functools import partial
from pathlib import Path
from headrace.rollout.version import Version
from headrace.transport.weights import WeightStore

WeightStore(Path(sys.argv[1])).publish(
    Version.parse(sys.argv[2]), partial(shutil.copytree, sys.argv[3], dirs_exist_ok=True)
)
"""
PROMPTS = [[5, 17, 80, 3, 3, 91, 44], [60, 2], list(range(10, 50))]


def random_model(seed: int, tied: bool) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return model.bfloat16().float() if GPU else model


def expected(model: Any) -> list[float]:
    """The logprob of every prompt token after the first of its prompt."""
    found = []
    for tokens in PROMPTS:
        ids = torch.tensor([tokens])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
        found += logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return found


def served(engine: LLM) -> list[float]:
    """The same from vLLM."""
    prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in PROMPTS]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return [
        entry[token].logprob
        for output, tokens in zip(outputs, PROMPTS, strict=True)
        for entry, token in zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
    ]


def check(engine: LLM, model: Any, what: str) -> None:
    engine.reset_prefix_cache()
    ours, theirs = torch.tensor(served(engine)), torch.tensor(expected(model))
    error = (ours - theirs).abs().max().item()
    print(f"{what}: {len(ours)} logprobs, largest difference from transformers {error:.1e}", flush=True)
    assert error < TOLERANCE, what


def refused(engine: LLM, path: Path, version: Version) -> str:
    try:
        engine.collective_rpc("load_published", args=(str(path), str(version)))
    except Exception as error:  # vLLM has its own type for each way of running workers
        return str(error)
    raise AssertionError(f"{path} was loaded as {version}")


def main(directory: Path, tied: bool, carrier: str) -> None:
    models = [random_model(seed, tied) for seed in range(4)]
    models[0].save_pretrained(directory / "model")
    store = WeightStore(directory / "weights")
    engine = LLM(
        model=str(directory / "model"),
        worker_extension_cls=EXTENSION,
        dtype="bfloat16" if GPU else "float32",
        attention_config={"backend": "FLASH_ATTN", "flash_attn_version": 3} if GPU else None,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
    )
    check(engine, models[0], "initial model")

    models[1].save_pretrained(directory / "first")
    arguments = [str(store.directory), "0-1", str(directory / "first")]
    subprocess.run([TRAINER_PYTHON, "-c", PUBLISH, *arguments], check=True)
    marker = read_marker(store.path(Version(0, 1)))
    acknowledged = engine.collective_rpc("load_published", args=(str(store.path(Version(0, 1))), "0-1"))
    assert acknowledged == [marker.checksum]
    check(engine, models[1], "version 0-1 from files")

    device = "cpu" if carrier == "stream" else "cuda"
    trainer = SenderProcess(store.directory, carrier, device, python=TRAINER_PYTHON)
    for step in (2, 3):
        models[step].save_pretrained(directory / "next")
        checksum = trainer.publish(Version(0, step), directory / "next" / "model.safetensors")
        path, version = store.path(Version(0, step)), f"0-{step}"
        assert not list(path.glob("*.safetensors"))
        assert checksum == read_marker(path).checksum
        engine.collective_rpc("fetch_published", args=(str(path), version))
        check(engine, models[step - 1], f"version 0-{step - 1} while {version} is fetched")
        while not all(worker["done"] for worker in engine.collective_rpc("has_published", args=(str(path), version))):
            time.sleep(0.01)
        assert engine.collective_rpc("load_published", args=(str(path), version)) == [checksum]
        check(engine, models[step], f"version {version} by {carrier}")

    print("refused:", refused(engine, path, Version(0, 4)))
    trainer.kill()
    check(engine, models[3], "version 0-3 after what was refused")
    engine.llm_engine.engine_core.shutdown()
    os._exit(0)  # vLLM leaves threads of its libraries running: at an ordinary exit one of them aborts now and then


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "tied", sys.argv[3])
