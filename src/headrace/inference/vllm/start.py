"""Starts vLLM as `[inference]` configures it: command line, environment, KV cache size."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from headrace.config.base import ConfigError
from headrace.config.inference import InferenceConfig
from headrace.errors import BadInput
from headrace.inference.backend import EngineError, resolve_max_model_len
from headrace.inference.client.http import HttpClient
from headrace.inference.schema import MAX_LOGPROBS
from headrace.inference.vllm.backend import VllmBackend
from headrace.inference.vllm.process import ChildDirectory, VllmFailed, VllmProcess
from headrace.machine import free_memory, raise_open_file_limit, visible_gpus
from headrace.text.hub import read_settings
from headrace.transport.lock import DeviceLock

WORKER = "headrace.inference.vllm.worker.PublishedWeightsWorker"
RESERVED_ARGUMENTS = frozenset(
    {
        *("--model", "--host", "--port", "--uds", "--api-key", "--served-model-name", "--generation-config"),
        *("--logprobs-mode", "--max-logprobs", "--scheduling-policy", "--worker-extension-cls"),
        *("--tensor-parallel-size", "--data-parallel-size", "--max-model-len", "--max-num-seqs"),
        "--enable-expert-parallel",
        *("--speculative-config", "--enable-lora", "--enable-return-routed-experts"),
    }
)
"""Arguments that `inference.vllm.args` may not contain: other keys set them, or Headrace does not support them."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's --max-lora-rank."""
SERVED = "policy"
"""vLLM's name of the model; our clients see another name."""
CPU_BLOCK_TOKENS = 128
"""Largest block of vLLM's KV cache on CPUs."""
MIN_CACHE_BYTES = 64 << 20


async def start_vllm(
    config: InferenceConfig,
    directory: Path,
    *,
    eos_token_id: int | None,
    decode: Callable[[list[int]], str],
    lock: DeviceLock | None = None,
) -> VllmBackend:
    """Start vLLM with the model in `directory`. Raises `Failure` if it does not start.

    `lock` is held: its side of the device lock, if it alternates with the trainer.
    """
    check_arguments(config.vllm.args)
    facts = read_facts(directory, eos_token_id)
    max_model_len = resolve_max_model_len(facts.positions, config.max_model_len)
    on_gpu = bool(visible_gpus())
    raise_open_file_limit()  # each request has its own connection
    child = ChildDirectory()
    http = HttpClient()
    cache = cache_bytes(config, facts, max_model_len, None if on_gpu else free_memory())
    process = await VllmProcess.start(
        child,
        config.vllm.python or Path(sys.executable),
        arguments(config, directory, child.socket, max_model_len, cache, on_gpu=on_gpu),
        environment(os.environ, config, child.import_path, on_gpu=on_gpu),
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
        clear_cache=config.kv_on_update == "recompute",
        adapters_directory=child.directory / "adapters",
        max_lora_rank=config.vllm.max_lora_rank,
        decode=decode,
        lock=lock,
        read_timeout_s=config.http.admin_timeout,
    )
    try:
        await backend.prepare()
    except BaseException as error:
        await backend.close()
        if isinstance(error, EngineError):
            raise VllmFailed(f"vLLM started but does not sample: {error}. {process.log_tail()}") from error
        raise
    return backend


def arguments(
    config: InferenceConfig, model: Path, socket: Path, max_model_len: int, cache: int | None, *, on_gpu: bool
) -> list[str]:
    """Return the command line arguments of vLLM's server."""
    vllm = config.vllm
    dtype = "bfloat16" if on_gpu else "float32"
    rank = next((rank for rank in LORA_RANKS if rank >= vllm.max_lora_rank), None) if vllm.max_lora_rank else None
    options: dict[str, object] = {
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
        "--enable-expert-parallel": vllm.expert_parallel,
        "--enable-return-routed-experts": config.routed_experts,
        "--enable-prefix-caching" if config.prefix_cache else "--no-enable-prefix-caching": True,
    }
    pairs = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return [*pairs, *(name for name, wanted in flags.items() if wanted), *vllm.args]


def environment(
    inherited: Mapping[str, str], config: InferenceConfig, import_path: Path, *, on_gpu: bool
) -> dict[str, str]:
    """Return the child's environment: the inherited one without API keys and our Python's settings."""
    hidden = {config.api_key_var, config.admin_key_var, "VLLM_API_KEY", "PYTHONHOME", "PYTHONPATH"}
    variables = {name: value for name, value in inherited.items() if name not in hidden}
    variables |= {
        "PYTHONPATH": str(import_path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a directory
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # enables pause, resume and calls on workers
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if config.vllm.max_lora_rank:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if not on_gpu:
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer has the same cores
        }
    return variables | config.vllm.env


def cache_bytes(config: InferenceConfig, facts: ModelFacts, max_model_len: int, free: int | None) -> int | None:
    """Return the size of the KV cache: as configured, or for as many longest requests as run at once.

    `free`: the free memory of a machine without GPU, of which at most a quarter is taken. None, with a GPU, leaves the
    size to vLLM, which measures the GPU's free memory.
    """
    if config.kv_cache_gb is not None:
        return int(config.kv_cache_gb * 2**30)
    if free is None:
        return None
    tokens = config.running_at_once(on_gpu=False) * -(-max_model_len // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS
    return max(MIN_CACHE_BYTES, min(tokens * (facts.cache_bytes or 1 << 16), free // 4))


def check_arguments(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if (name := argument.partition("=")[0].replace("_", "-")) in RESERVED_ARGUMENTS:
            raise ConfigError("set by other keys or not supported", key="inference.vllm.args", value=name)


class ModelFacts(msgspec.Struct):
    """Facts about a model from its JSON files."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    positions: int | None
    """The model's longest sequence, if its config has it."""
    cache_bytes: int
    """KV cache per token in float32; 0 if unknown."""


def read_facts(directory: Path, *eos_token_ids: int | None) -> ModelFacts:
    """Read the facts of a model directory; `eos_token_ids` are added to its own."""
    whole = read_settings(directory / "config.json")
    config = whole.get("text_config") or whole
    if not isinstance(config.get("vocab_size"), int):
        raise BadInput("vocab_size is missing", file=directory / "config.json")
    ends = {token for token in eos_token_ids if token is not None}
    defaults = directory / "generation_config.json"
    for source in (config, read_settings(defaults) if defaults.is_file() else {}):
        ids = source.get("eos_token_id")
        ends.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    heads = config.get("num_attention_heads") or 0
    head_dim = config.get("head_dim") or (config.get("hidden_size") or 0) // max(heads, 1)
    cached = (config.get("num_hidden_layers") or 0) * (config.get("num_key_value_heads") or heads) * head_dim
    return ModelFacts(config["vocab_size"], frozenset(ends), config.get("max_position_embeddings"), 4 * 2 * cached)
