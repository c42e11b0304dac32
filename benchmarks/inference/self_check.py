"""The self-check at load, on engines that are right and on engines with one fault each: how well it separates them.

    python -m benchmarks.inference.self_check [--seeds N] [--types bfloat16 ...] [--model DIRECTORY ...]

Prints the ratio that the check compares with `MAX_ROUNDING_RATIO`: the largest over all seeds of right engines, and the
smallest of each fault. The models are small ones of each family, with logits as large as those of trained models, and
the models in the given directories; seeds are those of weights and prompts. Uses a GPU if there is one, where right
engines are measured with graphs and compiled layers, and faulty ones without.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headrace.inference.embedded.batch import AttentionGroup
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.projections import join_projections
from headrace.inference.embedded.self_check import compute_texts, measure_deviations
from headrace.inference.rounding import MAX_ROUNDING_RATIO

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16, "query_pre_attn_scalar": 4}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3, experts": lambda: transformers.Qwen3MoeConfig(**SIZES, head_dim=16, **EXPERTS),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=60),
    "gemma 2": lambda: transformers.Gemma2Config(**SIZES, **GEMMA, sliding_window=9, attn_logit_softcapping=5.0),
    "gemma 3": lambda: transformers.Gemma3TextConfig(**SIZES, **GEMMA, sliding_window=30),
    "phi 3": lambda: transformers.Phi3Config(**SIZES),
    "gpt neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "olmo 2": lambda: transformers.Olmo2Config(**SIZES),
    "granite": lambda: transformers.GraniteConfig(**SIZES, attention_multiplier=0.1, residual_multiplier=0.5),
    "smollm 3": lambda: transformers.SmolLM3Config(**SIZES),
}
LOGIT_STD = 6.0
"""Standard deviation of the logits, about that of trained models."""


@torch.no_grad()
def make_sharp_model(family: str, seed: int, dtype: torch.dtype) -> Any:
    """Return a random model of a family in which logits, attention scores and biases are as large as trained ones."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
        elif "norm" in name:
            parameter.add_(torch.rand_like(parameter) - 0.5)
        if name.endswith("q_norm.weight"):
            parameter.add_(3)  # four times as much, whether it is a factor or added to one
    logits = model(input_ids=torch.arange(3, 43)[None], use_cache=False).logits
    model.get_output_embeddings().weight.mul_(LOGIT_STD / logits.std())
    return model.to(dtype)


@contextmanager
def changed_calls(model: Any, change: Callable[[dict[str, Any]], None], undo: Callable[[], None]) -> Iterator[None]:
    """Change the arguments of an engine's forwards: unlike plain ones, they have positions."""

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "position_ids" in kwargs:
            change(kwargs)
        return args, kwargs

    handles = [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(lambda *_: undo(), always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def changed_attention(change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Change the arguments of an engine's attention."""

    def broken(function: Any) -> Any:
        def attend(*args: Any, **kwargs: Any) -> Any:
            change(kwargs)
            return function(*args, **kwargs)

        return attend

    functions = {name: function for name, function in ALL_ATTENTION_FUNCTIONS.items() if name.startswith("headrace_")}
    for name, function in functions.items():
        AttentionInterface.register(name, broken(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            AttentionInterface.register(name, function)


def ignore_mask(model: Any) -> AbstractContextManager[Any]:
    def mask(group: AttentionGroup, _: int | None) -> torch.Tensor:
        return torch.zeros(group.count, 1, group.width, group.keys, dtype=group.dtype)

    return patch.object(AttentionGroup, "mask", mask)


def hide_keys(model: Any) -> AbstractContextManager[None]:
    return changed_attention(lambda kwargs: kwargs.update(sliding_window=8))


def ignore_window(model: Any) -> AbstractContextManager[None]:
    return changed_attention(lambda kwargs: kwargs.update(sliding_window=None))


def ignore_softcap(model: Any) -> AbstractContextManager[None]:
    return changed_attention(lambda kwargs: kwargs.update(softcap=None))


def ignore_scaling(model: Any) -> AbstractContextManager[None]:
    return changed_attention(lambda kwargs: kwargs.update(scaling=None))


def shift_second_block(model: Any) -> AbstractContextManager[None]:
    """Positions are off by one from the second block of the KV cache on."""

    def shift(kwargs: dict[str, Any]) -> None:
        kwargs["position_ids"] = kwargs["position_ids"] + (kwargs["position_ids"] >= 16)

    return changed_calls(model, shift, lambda: None)


def shift_decode(model: Any) -> AbstractContextManager[None]:
    """Positions of single tokens are off by one: those of steps too small for the prompts of the check."""

    def shift(kwargs: dict[str, Any]) -> None:
        kwargs["position_ids"] = kwargs["position_ids"] + (kwargs["position_ids"].numel() <= 8)

    return changed_calls(model, shift, lambda: None)


def drop_biases(model: Any) -> AbstractContextManager[None]:
    biases = {parameter: parameter.detach().clone() for name, parameter in model.named_parameters() if "bias" in name}

    @torch.no_grad()
    def zero(_: dict[str, Any]) -> None:
        for bias in biases:
            bias.zero_()

    @torch.no_grad()
    def restore() -> None:
        for bias, values in biases.items():
            bias.copy_(values)

    return changed_calls(model, zero, restore)


FAULTS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "mask": ignore_mask,
    "hidden keys": hide_keys,
    "positions": shift_second_block,
    "decode positions": shift_decode,
    "biases": drop_biases,
    "window": ignore_window,
    "soft-cap": ignore_softcap,
    "scaling": ignore_scaling,
}


def applicable_faults(model: Any) -> list[str]:
    """Return the faults that change what a model computes."""
    config = model.config
    missing = {
        "mask": model.device.type == "cuda",
        "biases": not any("bias" in name for name, _ in model.named_parameters()),
        "window": getattr(config, "sliding_window", None) is None,
        "soft-cap": getattr(config, "attn_logit_softcapping", None) is None,
        "scaling": not hasattr(config, "query_pre_attn_scalar") and not hasattr(config, "attention_multiplier"),
    }
    return [fault for fault in FAULTS if not missing.get(fault)]


def worst_ratio(model: Any, seed: int, fault: str | None = None) -> float:
    """Return the larger ratio of prefill and decode, for prompts of that seed."""
    if model.device.type == "cuda":
        join_projections(model)  # as when it is loaded
    with nullcontext() if fault is None else FAULTS[fault](model):
        engine = Engine(model, max_model_len=1200, max_running=4, compile=fault is None, graphs=fault is None)
        texts = compute_texts(engine, torch.Generator().manual_seed(seed))
    return max(deviation.ratio for deviation in measure_deviations(model, texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--types", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--model", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"on {device}; a model is refused above {MAX_ROUNDING_RATIO:g}")
    for source in [*options.model, *(() if options.model else FAMILIES)]:
        for dtype in options.types:
            right: list[float] = []
            wrong: dict[str, list[float]] = {}
            for seed in range(options.seeds):
                if isinstance(source, Path):
                    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).to(device).eval()
                else:
                    model = make_sharp_model(source, seed, getattr(torch, dtype)).to(device)
                right.append(worst_ratio(model, seed))
                for fault in applicable_faults(model):
                    wrong.setdefault(fault, []).append(worst_ratio(model, seed, fault))
            name = source.name if isinstance(source, Path) else source
            faults = ", ".join(f"{fault} {min(ratios):.3g}" for fault, ratios in wrong.items())
            print(f"{name:16} {dtype:9} right {max(right):5.2f}   {faults}", flush=True)


if __name__ == "__main__":
    main()
