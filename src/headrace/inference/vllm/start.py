"""From `[inference]` to a vLLM that is up: its command line, its environment, its start."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from headrace.config.base import ConfigError
from headrace.config.inference import InferenceConfig
from headrace.inference.backend import EngineError, resolve_max_model_len
from headrace.inference.client.http import HttpClient
from headrace.inference.schema import MAX_LOGPROBS
from headrace.inference.vllm.adapters import Adapters, rank_for
from headrace.inference.vllm.backend import VllmBackend
from headrace.inference.vllm.model_facts import ModelFacts, read_facts
from headrace.inference.vllm.process import Room, VllmFailed, VllmProcess
from headrace.machine import free_memory, visible_gpus
from headrace.transport.device_lock import DeviceLock

WORKER = "headrace.inference.vllm.worker.PublishedWeightsWorker"
OURS = frozenset(
    {
        *("--model", "--host", "--port", "--uds", "--api-key", "--served-model-name", "--generation-config"),
        *("--logprobs-mode", "--max-logprobs", "--scheduling-policy", "--worker-extension-cls"),
        *("--tensor-parallel-size", "--data-parallel-size", "--max-model-len", "--max-num-seqs"),
        *("--speculative-config", "--enable-lora"),
    }
)
"""Arguments of vLLM that `inference.vllm.args` may not give: other keys do, or Headrace could not work with them."""
SERVED = "policy"
"""What vLLM itself calls the model; its clients see another name."""


async def start_vllm(
    config: InferenceConfig,
    directory: Path,
    *,
    eos_token_id: int | None,
    decode: Callable[[list[int]], str],
    lock: DeviceLock | None = None,
) -> VllmBackend:
    """A vLLM that samples the model in `directory`. Raises `Failure` where it does not come up.

    `lock` is held: its side of the device lock, if it alternates with the trainer.
    """
    refuse_arguments(config.vllm.args)
    facts = read_facts(directory, eos_token_id)
    max_model_len = resolve_max_model_len(facts.positions, config.max_model_len)
    on_gpu = bool(visible_gpus())
    _allow_many_connections()
    room = Room()
    http = HttpClient()
    cache = cache_bytes(config, facts, max_model_len, on_gpu=on_gpu)
    process = await VllmProcess.start(
        room,
        config.vllm.python or Path(sys.executable),
        arguments(config, directory, room.socket, max_model_len, cache, on_gpu=on_gpu),
        environment(os.environ, config, room.import_path, on_gpu=on_gpu),
    )
    try:
        await process.ready(http, config.vllm.start_timeout)
    except BaseException:
        await process.stop()
        raise
    backend = VllmBackend(
        process,
        http,
        model_name=SERVED,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        max_model_len=max_model_len,
        max_running=config.running_at_once(on_gpu=on_gpu),
        max_waiting=config.max_waiting,
        replicas=config.vllm.data_parallel_size,
        forget=config.kv_on_update == "recompute",
        adapters=_adapters(config, room),
        decode=decode,
        lock=lock,
    )
    try:
        await backend.prepare()
    except BaseException as error:
        await backend.close()
        if isinstance(error, EngineError):
            raise VllmFailed(f"vLLM came up, but does not sample: {error}. {process.last_words()}") from error
        raise
    return backend


def arguments(
    config: InferenceConfig, model: Path, socket: Path, max_model_len: int, cache: int | None, *, on_gpu: bool
) -> list[str]:
    """Of vLLM's server."""
    vllm = config.vllm
    dtype = "bfloat16" if on_gpu else "float32"
    rank = rank_for(vllm.max_lora_rank) if vllm.max_lora_rank else None
    given: dict[str, object] = {
        "--model": model.absolute(),
        "--served-model-name": SERVED,
        "--uds": socket,
        "--dtype": dtype if config.model.dtype == "auto" else config.model.dtype,
        "--max-model-len": max_model_len,
        "--max-num-seqs": config.running_at_once(on_gpu=on_gpu),
        "--seed": config.seed,
        "--generation-config": "vllm",
        "--logprobs-mode": "processed_logprobs",
        "--max-logprobs": MAX_LOGPROBS + 1,
        "--scheduling-policy": "priority",
        "--worker-extension-cls": WORKER,
        "--tensor-parallel-size": vllm.tensor_parallel_size if vllm.tensor_parallel_size > 1 else None,
        "--data-parallel-size": vllm.data_parallel_size if vllm.data_parallel_size > 1 else None,
        "--gpu-memory-utilization": vllm.gpu_memory_utilization if on_gpu else None,
        "--kv-cache-memory-bytes": cache,
        "--max-lora-rank": rank,
        "--max-loras": vllm.max_loras if rank else None,
    }
    flags = {
        "--enable-prompt-tokens-details": True,
        "--disable-uvicorn-access-log": True,
        "--enforce-eager": not on_gpu,
        "--trust-remote-code": config.model.trust_remote_code,
        "--enable-lora": rank is not None,
        "--enable-prefix-caching" if config.prefix_cache else "--no-enable-prefix-caching": True,
    }
    pairs = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return [*pairs, *(name for name, wanted in flags.items() if wanted), *vllm.args]


def environment(ours: Mapping[str, str], config: InferenceConfig, import_path: Path, *, on_gpu: bool) -> dict[str, str]:
    """Of the child: ours without keys, which it does not need, and without our Python's own settings."""
    hidden = {config.api_key_var, config.admin_key_var, "VLLM_API_KEY", "PYTHONHOME", "PYTHONPATH"}
    found = {name: value for name, value in ours.items() if name not in hidden}
    found |= {
        "PYTHONPATH": str(import_path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a directory
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and calls on workers belong to it
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if config.vllm.max_lora_rank:
        found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if not on_gpu:
        found |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer has the same cores
        }
    return found | config.vllm.env


def cache_bytes(config: InferenceConfig, facts: ModelFacts, max_model_len: int, *, on_gpu: bool) -> int | None:
    """For keys and values; None leaves it to vLLM, which knows what a GPU has left."""
    if config.kv_cache_gb is not None:
        return int(config.kv_cache_gb * 2**30)
    running = config.running_at_once(on_gpu=on_gpu)
    return None if on_gpu else facts.cache_for(running, max_model_len, free_memory())


def refuse_arguments(given: list[str]) -> None:
    for word in given:
        name = word.partition("=")[0].replace("_", "-")
        if name in OURS:
            raise ConfigError("follows from other keys, or cannot be used", key="inference.vllm.args", value=name)


def _adapters(config: InferenceConfig, room: Room) -> Adapters | None:
    rank = config.vllm.max_lora_rank
    return Adapters(room.directory / "adapters", rank) if rank else None


def _allow_many_connections() -> None:
    """Each request has a connection of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
