"""An algorithm as a run file names it: its keys, how it is made, and what `headrace check-algorithm` holds it to.

One file per algorithm declares a subclass of `AlgorithmDeclaration` and registers it with `@ALGORITHMS.register`; run
files, `--explain`, docs/reference/config.md, dry-run checks and `check-algorithm` are derived from it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.algorithms.base import Algorithm
from headrace.config.algorithms import AlgorithmConfig
from headrace.config.model_reference import FrozenModelConfig, ModelReference
from headrace.inference.client.reference import Reference

SHIFT, ZERO_SUM, SIGNS, ORDER = "shift", "zero_sum", "signs", "order"
INVARIANTS = (SHIFT, ZERO_SUM, SIGNS, ORDER)
FINAL = "credit is final once the group is scored"


class Promises(msgspec.Struct, frozen=True):
    """The invariants of an algorithm's credit."""

    kept: frozenset[str] = frozenset()
    """Those that must hold."""
    reasons: dict[str, str] = msgspec.field(default_factory=dict)
    """Why others cannot hold. What is in neither is tried and reported without being judged."""
    length_weighted: bool = False
    """Whether the baseline that credit sums to zero around is the mean over tokens."""
    reward_alone: bool = True
    """Whether members with equal rewards have equal credit."""


class MakeContext(msgspec.Struct, frozen=True):
    """What a run gives to the algorithms that it makes."""

    seq_len: int
    connect: Callable[[FrozenModelConfig], Reference]
    """Makes a reference of a model that is served."""

    def reference(self, model: ModelReference | None) -> Reference | None:
        """Return a reference of a frozen model; None for the policy, which the host has."""
        return self.connect(model) if isinstance(model, FrozenModelConfig) else None


class AlgorithmDeclaration(AlgorithmConfig):
    def make(self, context: MakeContext) -> Algorithm:
        """Construct the algorithm; it still needs its `host` and `setup`."""
        raise NotImplementedError

    def check_imports(self) -> None:
        """Refuse the user's code that is missing or does not take its kwargs; none of it is called."""

    def promises(self, algorithm: Algorithm) -> Promises:
        """Return what `headrace check-algorithm` tests."""
        return Promises()

    def example_info(self) -> dict[str, str]:
        """Return the keys of a task's `info` that the algorithm needs, with example values."""
        return {}


def make_algorithm(
    config: AlgorithmConfig, *, seq_len: int, connect: Callable[[FrozenModelConfig], Reference]
) -> Algorithm:
    """Construct the algorithm of a section; it still needs its `host` and `setup`."""
    return declared(config).make(MakeContext(seq_len, connect))


def declared(config: AlgorithmConfig) -> AlgorithmDeclaration:
    assert isinstance(config, AlgorithmDeclaration)
    return config
