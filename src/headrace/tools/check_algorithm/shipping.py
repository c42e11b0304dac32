"""What is wrong with a batch that ships: what the trainer would refuse, tokens in another loss, invented scores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.rollout.packing import pack
from headrace.rollout.routing import selects_only_unsampled
from headrace.rollout.types import Sample
from headrace.tools.check_algorithm.comparing import close
from headrace.tools.check_algorithm.playing import Played
from headrace.tools.check_algorithm.stage import SEQ_LEN

ZERO_ON_PROMPTS = ("advantages", "rl_weights", "ce_weights", "ref_kl_weights")


def misfits(played: Played) -> Iterator[str]:
    """What the trainer would refuse, or misread."""
    for number, rollout in enumerate(played.credited.rollouts):
        if not played.drops[number]:
            for problem in filter(None, map(_misfit, rollout.samples)):
                yield f"{played.case.name!r}: rollout {number}: {problem}"


def _misfit(sample: Sample) -> str:
    try:
        pack([sample], SEQ_LEN)
    except ValueError as error:
        return str(error)
    for name in ZERO_ON_PROMPTS:
        if name in sample.streams and np.any(sample.streams[name][: sample.prompt_length]):
            return f"its {name} are not 0 on the prompt"
    return ""


def misrouted(sample: Sample, written: dict[str, np.ndarray], component: str) -> str:
    """After routing, streams are as the algorithm wrote them, zeros too. Where it said nothing of the sampled tokens,
    all of them are in the loss of its component."""
    if component == "rl" and sample.streams.keys() != written.keys():
        return "routing has added a stream"
    weights = f"{component}_weights"
    chosen = weights in written and not selects_only_unsampled(written[weights], sample.mask)
    for name, values in written.items():
        ours = np.ones_like(sample.mask) if name != weights or component == "rl" or chosen else ~sample.mask
        if not np.array_equal(sample.streams[name][ours], values[ours], equal_nan=True):
            return f"the {name} that it wrote are gone"
    if component == "rl":
        return ""
    if "rl_weights" not in written and np.any(sample.streams["rl_weights"]):
        return "its tokens are still in the rl loss"
    if not chosen and np.any(sample.streams[weights][sample.mask] != 1):
        return f"a sampled token does not have weight 1 in the {component} loss"
    return ""


def invented_scores(played: Played, healthy: Played) -> Iterator[str]:
    """Tokens in the ref_kl loss whose reference is not what a model that answers gave in the same place."""
    for number, (rollout, answered) in enumerate(zip(played.credited.rollouts, healthy.credited.rollouts, strict=True)):
        if played.drops[number] or healthy.drops[number]:
            continue
        for sample, like in zip(rollout.samples, answered.samples, strict=True):
            here, there = sample.streams.get("ref_logprobs"), like.streams.get("ref_logprobs")
            trained = np.asarray(sample.streams.get("ref_kl_weights", np.zeros(len(sample)))) != 0
            if here is None or there is None or here.shape != there.shape or here.shape != trained.shape:
                continue  # which is found elsewhere
            if not close(here[trained], there[trained]):
                yield f"{played.case.name!r}: rollout {number} is shipped with ref_logprobs that no model gave"
                break
