"""Loading of a model for the embedded engine: support checks, and the size of its KV cache.

The engine has its own attention and KV cache, for full and sliding-window attention; see `self_check` for the
comparison with the model's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from headrace.config.inference import InferenceConfig
from headrace.errors import BadInput
from headrace.inference.backend import resolve_max_model_len
from headrace.inference.embedded.cpu.weight_layout import lay_out_for_small_batches
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.grammar import Grammars
from headrace.inference.embedded.projections import join_projections
from headrace.inference.embedded.runner import key_shapes
from headrace.inference.embedded.self_check import UnsupportedModel, check_engine
from headrace.inference.latents import add_gates
from headrace.inference.memory import CONTEXT_BYTES, CPU_CACHE_SHARE, ColocatedTrainer, blocks_within, cache_budget
from headrace.inference.model_shape import VLLM_FIX, check_weights, embedded_obstacle
from headrace.machine import free_memory
from headrace.text.tokenizer import Tokenizer
from headrace.transport.weights import GATES_FILE

LENGTH_DEPENDENT_ROPE = {"longrope", "dynamic"}
"""Types whose positions depend on the longest sequence of a forward."""
MAX_BFLOAT16_SLOWDOWN = 8
"""How many times slower than float32 bfloat16 may be on a CPU that has instructions for it."""


def load_model(directory: Path, dtype: str = "auto", *, trust_remote_code: bool = False) -> Any:
    """Load a model to the GPU, if there is one; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype == "bfloat16" and device.type == "cpu" and not has_fast_bfloat16():
        fact = "this CPU has no bfloat16 instructions, and would be a hundred times slower than with float32"
        raise UnsupportedModel(fact, key="model.dtype", value="bfloat16", fix="Leave it out.")
    disable_progress_bar()  # logs are files
    check_weights(directory)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=automatic if dtype == "auto" else getattr(torch, dtype), trust_remote_code=trust_remote_code
    )
    model = model.to(device).eval()
    with _explained(model):
        if device.type == "cpu":
            lay_out_for_small_batches(model)
        else:
            join_projections(model)
    return model


@cache
def has_fast_bfloat16() -> bool:
    """Measure whether this CPU multiplies bfloat16 about as fast as float32."""

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(256, 256, dtype=dtype)
        matrix @ matrix  # warm-up
        start = time.perf_counter()
        matrix @ matrix
        return time.perf_counter() - start

    return min(seconds(torch.bfloat16) for _ in range(3)) < MAX_BFLOAT16_SLOWDOWN * min(
        seconds(torch.float32) for _ in range(3)
    )


def refuse_unsupported(model: Any, longest: int) -> None:
    """Raise for a model whose attention, or positions up to `longest`, the engine does not implement."""
    name = type(model).__name__
    config = model.config.get_text_config()
    if (obstacle := embedded_obstacle(config.to_dict())) is not None:
        raise UnsupportedModel(obstacle, key="model", value=name, fix=VLLM_FIX)
    if not getattr(model, "_supports_attention_backend", False):
        fact = "does not support transformers' attention interface, which the embedded engine needs"
        raise UnsupportedModel(fact, key="model", value=name, fix=VLLM_FIX)
    settings = getattr(config, "rope_parameters", None) or {}  # for all layers, or by type of layer
    for rope in [settings] if "rope_type" in settings else settings.values():
        if not isinstance(rope, dict):
            continue
        plain = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE and longest > plain:
            raise UnsupportedModel(
                f"{name} computes other positions ({rope['rope_type']}) in batches with a sequence longer than {plain} "
                "tokens, and the engine batches short sequences with long ones",
                key="inference.max_model_len",
                value=longest,
                fix=f"Lower it to {plain} or less.",
            )


def cache_memory(model: Any, gigabytes: float | None, shared: ColocatedTrainer | None) -> int:
    """Return the bytes for the KV cache of a loaded model: as configured, or by the free memory.

    `shared` is the trainer on the model's device, if there is one.
    """
    if gigabytes is not None:
        return int(gigabytes * 1e9)
    if model.device.type == "cpu":
        return int(free_memory() * CPU_CACHE_SHARE)
    free, total = torch.cuda.mem_get_info(model.device)
    own = torch.cuda.memory_reserved(model.device) + CONTEXT_BYTES
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return cache_budget(free, total, own, parameters, shared)


def kv_blocks(model: Any, longest: int, max_running: int, memory: int) -> int:
    """Return the blocks of the KV cache: for `max_running` requests of `longest` tokens, but at most `memory` bytes."""
    shapes = key_shapes(model.config.get_text_config())
    token_bytes = int(2 * sum(heads * dim for heads, dim in shapes) * model.dtype.itemsize)
    return blocks_within(memory, token_bytes, longest, max_running)


def load_engine(
    config: InferenceConfig, directory: Path, tokenizer: Tokenizer, shared: ColocatedTrainer | None = None
) -> Engine:
    """Load a model into an engine, and check that against the plain model."""
    model = load_model(directory, config.model.dtype, trust_remote_code=config.model.trust_remote_code)
    if (config.model.latents is not None and config.model.latents.has_gates) or (directory / GATES_FILE).is_file():
        add_gates(model, directory)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = resolve_max_model_len(positions, config.max_model_len)
    refuse_unsupported(model, longest)
    running = config.running_at_once(on_gpu=model.device.type == "cuda")
    memory = cache_memory(model, config.kv_cache_gb, shared)
    eos = eos_token_ids(model, tokenizer.eos_token_id)
    with _explained(model):
        engine = Engine(
            model,
            max_model_len=longest,
            kv_blocks=kv_blocks(model, longest, running, memory),
            max_running=running,
            max_step_tokens=config.max_step_tokens,
            prefix_cache=config.prefix_cache,
            kv_on_update=config.kv_on_update,
            eos_token_ids=eos,
            seed=config.seed,
            base=directory,
            decode=tokenizer.decode,
            special_tokens=tokenizer.control_tokens,
            grammars=Grammars(tokenizer.backend, model.get_input_embeddings().num_embeddings, eos),
            compile=config.compile,
            speculative_tokens=config.speculative_tokens,
            routed_experts=config.routed_experts,
        )
        check_engine(engine)
    return engine


@contextmanager
def _explained(model: Any) -> Iterator[None]:
    """Raise `UnsupportedModel` for what fails in the block by the model's own code."""
    try:
        yield
    except (BadInput, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        fact = f"the embedded engine cannot run it: {type(error).__name__}: {error}"
        raise UnsupportedModel(fact, key="model", value=type(model).__name__, fix=VLLM_FIX) from error


def eos_token_ids(model: Any, *others: int | None) -> set[int]:
    """Return the end-of-sequence ids of the model's configuration and the caller."""
    ids: set[int] = {token for token in others if token is not None}
    for source in (model.config.get_text_config(), model.generation_config):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, Iterable) else [] if value is None else [value])
    return ids
