"""A model directory into an engine, refusing models that the engine would sample wrongly.

The engine brings its own attention and cache. What it supports is known (full and sliding-window attention); that a
model really computes the same through them is checked once at load, against the model's own plain attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from headrace.errors import BadInput
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.kv_cache import ATTENTION
from headrace.inference.embedded.request import EngineError
from headrace.inference.schema import SamplingParams

LONGEST_BY_DEFAULT = 4096
LAYER_TYPES = {"full_attention", "sliding_attention"}
CHECKED_PROMPT = 12
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Mean difference of logprobs above which a model is refused: rounding stays far below, a wrong mask far above."""


class UnsupportedModel(BadInput):
    """The embedded engine cannot sample this model. The message says why."""


def load_model(directory: Path, dtype: str = "auto", *, trust_remote_code: bool = False) -> Any:
    """The model on the best device there is; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    automatic = torch.bfloat16 if device.type == "cuda" else torch.float32
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


def lay_out_for_small_batches(model: torch.nn.Module) -> None:
    """Store the weights of linear layers by column: same values and shapes, up to three times faster on CPUs.

    A batch of tens of rows times a transposed matrix is where CPU libraries lose most of their speed.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and id(module.weight) not in embeddings:
            module.weight.data = module.weight.data.t().contiguous().t()


def refuse_unsupported(model: Any) -> None:
    """Raise for architectures whose attention the engine does not implement."""
    name = type(model).__name__
    config = model.config.get_text_config()
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if strange:
        raise UnsupportedModel(f"{name} has {', '.join(strange)} layers; the embedded engine has full and sliding ones")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"{name} does not use transformers' attention interface, which the embedded engine needs"
        )


def max_model_len(model: Any, configured: int | None) -> int:
    """The configured limit, else the model's own, at most 4096."""
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if configured is None:
        return min(own or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)
    if own is not None and configured > own:
        raise UnsupportedModel(
            f"max_model_len = {configured}, but the model's max_position_embeddings is {own}: set "
            f"inference.max_model_len to {own} or less; where a run does not set it, it follows from seq_len"
        )
    return configured


def eos_token_ids(model: Any, *others: int | None) -> set[int]:
    """Every id that the model's configuration, or the caller, calls end-of-sequence."""
    found: set[int] = {token for token in others if token is not None}
    for source in (model.config.get_text_config(), model.generation_config):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, Iterable) else [] if value is None else [value])
    return found


def check_engine(engine: Engine) -> None:
    """Raise unless the engine gives a short random text the logprobs that the plain model gives it."""
    generator = torch.Generator().manual_seed(0)
    length = min(CHECKED_PROMPT, engine.max_model_len - 1)
    prompt: list[int] = torch.randint(engine.vocab_size, (length,), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    request = engine.submit(prompt, params)
    while engine.has_work:
        engine.step()
    engine.tokens_sampled = 0
    name = type(engine.model).__name__
    try:
        result = request.future.result()
    except EngineError as error:
        raise UnsupportedModel(f"the embedded engine cannot run {name}: {error}") from error
    ours = torch.tensor((result.prompt_logprobs or [])[1:] + result.logprobs)
    difference = (ours - _plain_logprobs(engine.model, request.tokens)).abs().mean().item()
    tolerance = TOLERANCE[engine.model.dtype]
    if not difference <= tolerance:
        raise UnsupportedModel(
            f"the embedded engine does not reproduce {name}: logprobs differ by {difference:.2g} on average, "
            f"where rounding explains {tolerance:.2g}; its attention must do something the engine does not"
        )


@torch.inference_mode()
def _plain_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Each token's logprob after those before it, by the model's own attention."""
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([tokens], device=model.device)
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), -1)
        return logprobs.gather(-1, ids[0, 1:, None])[:, 0].cpu()
    finally:
        model.set_attn_implementation(ATTENTION)
