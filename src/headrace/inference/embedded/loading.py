"""A model directory into an engine, refusing models that the engine would sample wrongly.

The engine brings its own attention and cache. What it supports is known (full and sliding-window attention); that a
model computes the same through them is checked once at load, on two short texts, against the model's own plain
attention; what only longer ones would show (a window of thousands of tokens, say) is not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from headrace.errors import BadInput
from headrace.inference.backend import EngineError, resolve_max_model_len
from headrace.inference.embedded.blocks import BLOCK, blocks_for
from headrace.inference.embedded.cpu_layout import lay_out_for_small_batches
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.runner import key_shapes
from headrace.inference.schema import SamplingParams

LAYER_TYPES = {"full_attention", "sliding_attention"}
ROPE_BY_LENGTH = {"longrope", "dynamic"}
"""Positions that depend on the longest sequence of a forward."""
CHECKED = (40, 3)
"""Tokens of the prompts that the check computes side by side."""
SLOWER = 8
"""How many times slower than float32 bfloat16 may be and still count as an instruction of the CPU."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Mean difference of logprobs above which a model is refused: rounding stays far below, a wrong mask far above."""


class UnsupportedModel(BadInput):
    """The embedded engine cannot sample this model. The message says why."""


def load_model(directory: Path, dtype: str = "auto", *, trust_remote_code: bool = False) -> Any:
    """The model on the best device there is; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype == "bfloat16" and device.type == "cpu" and not multiplies_bfloat16():
        raise UnsupportedModel(
            "this CPU has no instructions for it and would be a hundred times slower than in float32",
            key="model.dtype",
            value="bfloat16",
            fix="Leave it out.",
        )
    disable_progress_bar()  # our logs are files
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=automatic if dtype == "auto" else getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
    )
    model = model.to(device).eval()
    if device.type == "cpu":
        lay_out_for_small_batches(model)
    return model


@cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 about as fast as float32, by trying."""

    def seconds(dtype: torch.dtype) -> float:
        matrix = torch.ones(256, 256, dtype=dtype)
        matrix @ matrix  # the first one sets things up
        start = time.perf_counter()
        matrix @ matrix
        return time.perf_counter() - start

    return min(seconds(torch.bfloat16) for _ in range(3)) < SLOWER * min(seconds(torch.float32) for _ in range(3))


def refuse_unsupported(model: Any, longest: int) -> None:
    """Raise for architectures whose attention, or positions up to that length, the engine does not implement."""
    name = type(model).__name__
    config = model.config.get_text_config()
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if strange:
        raise UnsupportedModel(
            f"has {', '.join(strange)} layers; the embedded engine has full and sliding ones", key="model", value=name
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(
            "does not use transformers' attention interface, which the embedded engine needs", key="model", value=name
        )
    for rope in _rope_settings(config):
        plain = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if rope.get("rope_type") in ROPE_BY_LENGTH and longest > plain:
            raise UnsupportedModel(
                f"{name} has other positions ({rope['rope_type']}) where any sequence is longer than {plain} tokens, "
                "and long sequences share a step with short ones",
                key="inference.max_model_len",
                value=longest,
                fix=f"Lower it to {plain} or less.",
            )


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    """One for all layers, or one for each of their types."""
    given = getattr(config, "rope_parameters", None) or {}
    return [given] if "rope_type" in given else [each for each in given.values() if isinstance(each, dict)]


def max_model_len(model: Any, configured: int | None) -> int:
    return resolve_max_model_len(getattr(model.config.get_text_config(), "max_position_embeddings", None), configured)


def kv_blocks(model: Any, longest: int, max_running: int, memory: int) -> int:
    """Blocks of the KV cache: enough for that many of the longest requests, but no more than fit into those bytes."""
    size = BLOCK * _bytes_per_token(model)
    needed, most = blocks_for(longest), int(memory / size)
    if most < needed:
        raise UnsupportedModel(
            f"such a request takes {needed * size / 1e9:.2g} GB of KV cache, and there are {memory / 1e9:.2g}",
            key="inference.max_model_len",
            value=longest,
            fix="Lower it, or raise inference.kv_cache_gb.",
        )
    return min(most, max_running * needed)


def _bytes_per_token(model: Any) -> int:
    shapes = key_shapes(model.config.get_text_config())
    return int(2 * sum(heads * dim for heads, dim in shapes) * model.dtype.itemsize)


def eos_token_ids(model: Any, *others: int | None) -> set[int]:
    """Every id that the model's configuration, or the caller, calls end-of-sequence."""
    found: set[int] = {token for token in others if token is not None}
    for source in (model.config.get_text_config(), model.generation_config):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, Iterable) else [] if value is None else [value])
    return found


def check_engine(engine: Engine) -> None:
    """Raise unless the engine gives two short random texts the logprobs that the plain model gives them."""
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    requests = []
    for length in CHECKED:
        size = (max(1, min(length, engine.max_model_len - 4)),)
        requests.append(engine.submit(torch.randint(engine.vocab_size, size, generator=generator).tolist(), params))
    while engine.has_work:
        engine.step()
    engine.forget_counts()
    name = type(engine.model).__name__
    try:
        results = [request.future.result() for request in requests]
    except EngineError as error:
        raise UnsupportedModel(f"the embedded engine cannot run {name}: {error}") from error
    ours = [torch.tensor((result.prompt_logprobs or [])[1:] + result.logprobs) for result in results]
    plain = [_plain_logprobs(engine.model, request.tokens) for request in requests]
    difference = (torch.cat(ours) - torch.cat(plain)).abs().mean().item()
    tolerance = TOLERANCE[engine.model.dtype]
    if not difference <= tolerance:
        raise UnsupportedModel(
            f"the embedded engine does not reproduce {name}: logprobs differ by {difference:.2g} on average, "
            f"where rounding explains {tolerance:.2g}; its attention must do something the engine does not"
        )


@torch.inference_mode()
def _plain_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Each token's logprob after those before it, by the model's own attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([tokens], device=model.device)
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), -1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].cpu()
    finally:
        model.set_attn_implementation(before)
