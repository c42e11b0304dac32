"""vLLM's samplers, made to report logprobs at the request's temperature over the whole vocabulary.

With `processed_logprobs` they report those of what top-p, top-k and min-p left, which say nothing about the policy that
is trained. Both of vLLM's samplers apply the temperature first: what there is at that moment is kept, and reported.
Whoever installs this must check that it works (`backend.py` does): vLLM promises nothing about its samplers, and one
that looks different is left alone.
"""

from __future__ import annotations

from typing import Any


def report_untruncated(model_runner: Any) -> bool:
    """Whether the runner's sampler was one of those that are known here."""
    sampler: Any = getattr(model_runner, "sampler", None)
    if hasattr(sampler, "topk_topp_sampler") and hasattr(sampler, "apply_temperature"):
        _keep_logprobs(sampler)
    elif hasattr(sampler, "sampling_states") and hasattr(sampler.sampling_states, "apply_min_p"):
        _keep_logits(sampler)
    else:
        return False
    return True


def _keep_logprobs(sampler: Any) -> None:
    """The sampler of the first model runner, which hands on logprobs."""
    apply_temperature, sample = sampler.apply_temperature, sampler.sample
    kept: list[Any] = []

    def keeping(logits: Any, *arguments: Any) -> Any:
        logits = apply_temperature(logits, *arguments)
        kept.append(logits.clone())
        return logits

    def sampling(*arguments: Any, **named: Any) -> Any:
        sampled, logprobs = sample(*arguments, **named)
        if kept:  # else all requests are greedy, and nothing was taken away
            logits = kept.pop()
            logprobs = None if logprobs is None else sampler.compute_logprobs(logits)
        return sampled, logprobs

    sampler.apply_temperature, sampler.sample = keeping, sampling


def _keep_logits(sampler: Any) -> None:
    """The sampler of the second model runner, which hands on logits."""
    apply_min_p, sample = sampler.sampling_states.apply_min_p, sampler.sample
    kept: list[Any] = []

    def keeping(logits: Any, *arguments: Any) -> Any:
        kept.append(logits.clone())  # the temperature is in them already
        return apply_min_p(logits, *arguments)

    def sampling(*arguments: Any, **named: Any) -> Any:
        sampled, logits = sample(*arguments, **named)
        return sampled, kept.pop() if kept else logits

    sampler.sampling_states.apply_min_p, sampler.sample = keeping, sampling
