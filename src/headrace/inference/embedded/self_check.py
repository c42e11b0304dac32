"""The self-check of an engine at load: its logprobs against those of the model's own code, within measured rounding.

How much rounding moves logprobs depends on the weights: trained ones have large logits, of which 16 bits round off
tenths. So rounding is measured. The model's own code computes the same tokens in the model's type and in a wider one,
and the engine may be a few times as far from the wider result as the model's own code is; flash-attention is tested in
the same way. The model's own code has eager attention: other attention functions of transformers ignore soft-caps.

Prefill and decode are judged separately, since a fault in one of them would be small in the mean over both.

Left out on purpose: sliding windows of more than `MAX_CHECKED_WINDOW` tokens, since longer texts would cost seconds and
gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.errors import BadInput
from headrace.inference.backend import EngineError, GenerationResult
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.projections import separate_projections
from headrace.inference.rounding import MAX_ROUNDING_RATIO, WiderType, typical_difference
from headrace.inference.schema import SamplingParams

SCORED_TOKENS = 40
"""Prompt tokens whose logprobs are compared: more than two blocks of the KV cache."""
SHORT_PROMPT_TOKENS = (3, 20)
"""Lengths of further prompts to sample after."""
SAMPLED_TOKENS = 12
"""Tokens that are sampled after each prompt."""
MAX_CHECKED_WINDOW = 1024
"""Longest sliding window that the scored prompt exceeds."""
ATTEMPTS = 3
"""Sets of prompts that must all deviate: rarely, rounding sends a token to another expert, and moves those after it."""
NEGLIGIBLE_DIFFERENCE = 1e-4
"""Difference that is accepted without measuring rounding; right engines stay below it in float32."""


class UnsupportedModel(BadInput):
    """The embedded engine cannot sample from this model."""


class Text(NamedTuple):
    """Tokens of a request, and the engine's logprobs of the last of them."""

    tokens: list[int]
    prefill: list[float]
    decode: list[float]


class Deviation(NamedTuple):
    """Typical differences from the logprobs of a computation in a wider type."""

    phase: str
    engine: float
    rounding: float
    """Of the model's own code in the model's type."""

    @property
    def ratio(self) -> float:
        return self.engine / (self.rounding + NEGLIGIBLE_DIFFERENCE)


def check_engine(engine: Engine) -> None:
    """Raise if the engine's logprobs differ by more than rounding from those of the model's own code."""
    name = type(engine.model).__name__
    generator = torch.Generator().manual_seed(0)
    for _ in range(ATTEMPTS):
        try:
            texts = compute_texts(engine, generator)
        except EngineError as error:
            raise UnsupportedModel(f"the embedded engine cannot run it: {error}", key="model", value=name) from error
        deviations = measure_deviations(engine.model, texts)
        if all(deviation.ratio <= MAX_ROUNDING_RATIO for deviation in deviations):
            engine.reset_counters()
            return
    facts = [
        f"in {phase}, logprobs differ by {difference:.2g} from a more precise computation, and rounding explains "
        f"{rounding:.2g}"
        for phase, difference, rounding in deviations
    ]
    raise UnsupportedModel(
        f"the embedded engine does not reproduce it: {'; '.join(facts)}. Its attention probably has a feature that the "
        "engine lacks",
        key="model",
        value=name,
        fix='Set inference.engine to "vllm".',
    )


def compute_texts(engine: Engine, generator: torch.Generator) -> list[Text]:
    """Let the engine compute random prompts, and sample after them; raises `EngineError` if it cannot."""
    window = getattr(engine.model.config.get_text_config(), "sliding_window", None) or 0
    exceeded = window if window <= MAX_CHECKED_WINDOW else 0
    longest = max(1, engine.max_model_len - SAMPLED_TOKENS)
    prompts = [
        torch.randint(engine.vocab_size, (min(length, longest),), generator=generator).tolist()
        for length in (exceeded + SCORED_TOKENS, *SHORT_PROMPT_TOKENS)
    ]
    # First the scored prompt alone: on a GPU prompts beside one with logprobs would take its path, too.
    (scored,) = _generate(engine, prompts[:1], SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0))
    results = _generate(engine, prompts, SamplingParams(max_tokens=SAMPLED_TOKENS, ignore_eos=True))
    texts = [
        Text(prompt + result.token_ids, [], result.logprobs) for prompt, result in zip(prompts, results, strict=True)
    ]
    texts[0] = texts[0]._replace(prefill=(scored.prompt_logprobs or [])[1:][-SCORED_TOKENS:])
    return texts


def measure_deviations(model: Any, texts: Sequence[Text]) -> list[Deviation]:
    """Return the deviation in prefill and in decode."""
    ours = torch.tensor([logprob for text in texts for logprob in text.prefill + text.decode], dtype=torch.float64)
    is_decode = torch.tensor([n >= len(text.prefill) for text in texts for n in range(len(text.prefill + text.decode))])
    phases = [(phase, own) for phase, own in (("prefill", ~is_decode), ("decode", is_decode)) if own.any()]
    plain = plain_logprobs(model, texts)
    if all(typical_difference(ours[own], plain[own]) <= NEGLIGIBLE_DIFFERENCE for _, own in phases):
        exact = plain
    else:
        with WiderType(model.dtype):
            exact = plain_logprobs(model, texts)
    return [
        Deviation(phase, typical_difference(ours[own], exact[own]), typical_difference(plain[own], exact[own]))
        for phase, own in phases
    ]


@torch.inference_mode()
def plain_logprobs(model: Any, texts: Sequence[Text]) -> Tensor:
    """Return the logprobs of the tokens that each text has logprobs of, by the model's own code."""
    parts = []
    with _own_code(model):
        for text in texts:
            ids = torch.tensor([text.tokens], device=model.device)
            count = len(text.prefill) + len(text.decode)
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=count + 1).logits[0, :-1]
            parts.append(torch.log_softmax(logits.double(), -1).gather(-1, ids[0, -count:, None])[:, 0].cpu())
    return torch.cat(parts)


@contextmanager
def _own_code(model: Any) -> Iterator[None]:
    """Run the model with its own attention, experts and linear layers in the block, not those for speed."""
    attention, experts = model.config._attn_implementation, model.config._experts_implementation
    replaced = {
        module: vars(module).pop("forward", None) for module in model.modules() if isinstance(module, nn.Linear)
    }
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    try:
        with separate_projections(model):
            yield
    finally:
        model.set_attn_implementation(attention)
        model.set_experts_implementation(experts)
        for module, forward in replaced.items():
            if forward is not None:
                vars(module)["forward"] = forward


def _generate(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[GenerationResult]:
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return [request.future.result() for request in requests]
