"""What an algorithm has promised: what must hold of it, what cannot be asked of it, and what is only tried and told.

Those that ship promise what their maths say. A class of anybody's own promises nothing unless it has the attribute

    promises = ("shift", "zero_sum", "signs", "order")

with some of these names; the rest is tried all the same, and told without being judged.
"""

from __future__ import annotations

import msgspec

from headrace.algorithms.base import Algorithm
from headrace.algorithms.rlcsd import Rlcsd
from headrace.config.algorithms import (
    AlgoConfig,
    CustomAlgoConfig,
    EchoConfig,
    GrpoConfig,
    HierarchicalGrpoConfig,
    ImportedAlgoConfig,
    MaxRlConfig,
    OpdConfig,
    OpsdConfig,
    RaeConfig,
    RewardAlgoConfig,
    RlcsdConfig,
    SftAlgoConfig,
)
from headrace.config.length_penalty import LinearPenaltyConfig, OverlongPenaltyConfig
from headrace.errors import BadInput

SHIFT, ZERO_SUM, SIGNS, ORDER = "shift", "zero_sum", "signs", "order"
PROMISES = (SHIFT, ZERO_SUM, SIGNS, ORDER)
_FINAL = "credit is final once the group is scored"


class Promises(msgspec.Struct, frozen=True):
    kept: frozenset[str] = frozenset()
    """What must hold."""
    reasons: dict[str, str] = msgspec.field(default_factory=dict)
    """Why others cannot be asked for. What is in neither is tried and told."""
    length_weighted: bool = False
    """Whether the baseline that credit sums to zero around is the mean over tokens."""
    reward_alone: bool = True
    """Whether members with equal rewards have equal credit."""


def promises_of(config: AlgoConfig, algorithm: Algorithm) -> Promises:
    match config:
        case GrpoConfig() | EchoConfig():
            return _of_group_credit(config)
        case MaxRlConfig():
            return Promises(frozenset({ZERO_SUM, ORDER}), {SHIFT: "it divides by the mean reward", SIGNS: _FINAL})
        case RewardAlgoConfig():
            itself = "credit is the reward itself"
            return Promises(frozenset({ORDER}), {SHIFT: itself, ZERO_SUM: itself, SIGNS: _FINAL})
        case OpdConfig() | OpsdConfig() | SftAlgoConfig():
            return Promises(frozenset({ORDER}), dict.fromkeys((SHIFT, ZERO_SUM, SIGNS), "it gives no credit"))
        case RlcsdConfig():
            base = _of_group_credit(config)
            reasons = {name: reason for name, reason in base.reasons.items() if name != SIGNS}
            return msgspec.structs.replace(base, kept=base.kept | {SIGNS}, reasons=reasons)
        case RaeConfig():
            before = "credit is measured from what was earned before"
            return Promises(reasons={SHIFT: before, ZERO_SUM: before, SIGNS: _FINAL}, reward_alone=False)
        case HierarchicalGrpoConfig():
            return Promises(frozenset({SHIFT, ZERO_SUM, ORDER}), {SIGNS: _FINAL})
        case CustomAlgoConfig() | ImportedAlgoConfig():
            return _of_own(algorithm)


def _of_group_credit(config: GrpoConfig | EchoConfig | RlcsdConfig) -> Promises:
    kept, reasons = {ZERO_SUM}, {SIGNS: _FINAL}
    penalty = config.length_penalty
    if isinstance(penalty, LinearPenaltyConfig):
        reasons[SHIFT] = "a linear penalty grows with the mean reward"
    elif penalty is not None and not isinstance(penalty, OverlongPenaltyConfig):
        reasons[SHIFT] = f"the {penalty.type} penalty multiplies rewards"
    elif not config.terms:
        kept.add(SHIFT)
    if not config.terms:  # who knows what a term reads
        kept.add(ORDER)
    alone = penalty is None and not config.terms
    return Promises(frozenset(kept), reasons, config.length_weighted_baseline, reward_alone=alone)


def _of_own(algorithm: Algorithm) -> Promises:
    given = algorithm.promises
    unknown = [name for name in given if name not in PROMISES]
    if unknown:
        key, fix = f"{type(algorithm).__name__}.promises", f"Known: {', '.join(PROMISES)}."
        raise BadInput("unknown promise", key=key, value=unknown[0], fix=fix)
    modulates = {SIGNS} if isinstance(algorithm, Rlcsd) else set()
    return Promises(frozenset({*given, *modulates}))
