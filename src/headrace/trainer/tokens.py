"""Every token of one optimizer step, flat: which loss components it belongs to, and how micro-batches cut the step.

Alignment: values at index j belong to token j. The first token of a sequence has no prediction, so it is a member of
nothing. A token is *scored* when any component has it as a member; nothing else needs logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headrace.rollout.packing import NO_SAMPLE, STREAM_DEFAULTS, Bin
from headrace.trainer.loss import PackedInputs
from headrace.trainer.row import Kernel, Row, common_prefix, make_row, on_device

COMPONENTS = ("rl", "ce", "ref_kl")
SHARED = 8
"""Tokens that a sequence shares with others take as much memory as one of its own: attention gathers their keys."""


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a step, and their scored tokens as indices into the step's flat arrays."""

    row: Row
    predictors: torch.Tensor
    """For each scored token, the place in the row that predicts it."""
    scored: np.ndarray
    sequences: torch.Tensor
    """For each scored token, which of the micro-batch's sequences it is of: 0, 1, ..."""


class StepTokens:
    """The flat arrays of a step. Absent streams stay absent: plain RL ships none and pays for none."""

    def __init__(self, bins: list[Bin]) -> None:
        self.lengths = np.concatenate([bin.lengths for bin in bins])
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        self.sources = np.concatenate([bin.sources for bin in bins])
        self.token_ids = np.concatenate([bin.token_ids for bin in bins])
        self.mask = np.concatenate([bin.mask for bin in bins])
        self.logprobs = np.concatenate([bin.logprobs for bin in bins])
        self.versions = np.concatenate([bin.versions for bin in bins])
        self.temperatures = np.concatenate([bin.temperatures for bin in bins])
        self.streams = {name: _joined(bins, name) for name in STREAM_DEFAULTS if any(name in b.streams for b in bins)}
        self.members = self._members()
        self.scored = np.logical_or.reduce(list(self.members.values()))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def real(self) -> int:
        """Tokens of samples: padding does not count."""
        return int(self.lengths[self.sources != NO_SAMPLE].sum())

    def count(self, component: str) -> int:
        """Member tokens of a component in the whole step."""
        return int(self.members[component].sum())

    def samples_of(self, scored: np.ndarray) -> np.ndarray:
        """For each token, the number of the packed sample it belongs to."""
        return self.sources[np.searchsorted(self.starts, scored, side="right") - 1]

    def cut(self, limit: int) -> list[list[int]]:
        """The sequences that are trained, in groups that take as much as `limit` tokens; neighbours share prefixes."""
        groups: list[list[int]] = []
        size, previous = 0, np.zeros(0, np.int64)
        for index in self._trained_in_order():
            sequence = self._sequence(index)
            taken = self._taken(index, common_prefix(previous, sequence))
            if not groups or size + taken > limit:
                groups.append([])
                size, taken = 0, self._taken(index, 0)
            groups[-1].append(index)
            size, previous = size + taken, sequence
        return groups

    def _taken(self, index: int, shared: int) -> int:
        """What a sequence takes of a row, in tokens, if so many of its own are in the row already."""
        start, length = int(self.starts[index]), int(self.lengths[index])
        return max(length - shared + -(-shared // SHARED), int(self.scored[start : start + length].sum()))

    def loss_inputs(self, component: str, batch: MicroBatch, logprobs: torch.Tensor) -> PackedInputs:
        """The component's view of a micro-batch's scored tokens."""

        def at(values: np.ndarray) -> torch.Tensor:
            return on_device(values[batch.scored], logprobs.device)

        weights = self.streams.get(f"{component}_weights")
        reference = self.streams.get("ref_logprobs")
        if reference is None and component == "ref_kl":  # other ranks have some; here nothing will be read
            reference = np.zeros(len(self), np.float32)
        advantages = self.streams.get("advantages")
        return PackedInputs(
            logprobs,
            at(self.logprobs),
            None if reference is None else at(reference),
            torch.zeros_like(logprobs) if advantages is None else at(advantages),
            at(self.members[component]),
            None if weights is None else at(weights),
            sequences=batch.sequences,
        )

    def _members(self) -> dict[str, np.ndarray]:
        nothing = np.zeros(len(self), np.bool_)
        weighted = {c: self.streams[f"{c}_weights"] != 0 for c in COMPONENTS if f"{c}_weights" in self.streams}
        members = {
            "rl": self.mask & weighted.get("rl", True),
            "ce": weighted.get("ce", nothing),
            "ref_kl": weighted.get("ref_kl", nothing),
        }
        first = nothing.copy()
        first[self.starts] = True
        return {component: inside & ~first for component, inside in members.items()}

    def _trained_in_order(self) -> list[int]:
        """Sequences with scored tokens, in lexicographic order, which puts common prefixes side by side."""
        trained = np.flatnonzero(np.logical_or.reduceat(self.scored, self.starts))
        return sorted(trained.tolist(), key=lambda index: self._sequence(index).astype(">u4").tobytes())

    def _sequence(self, index: int) -> np.ndarray:
        return self.token_ids[self.starts[index] : self.starts[index] + self.lengths[index]]

    def micro_batch(self, group: list[int], device: torch.device, kernel: Kernel = "sdpa") -> MicroBatch:
        """A group as one row; for an empty group a row that scores nothing, since every rank must run as often."""
        if not group:
            nothing = torch.zeros(0, dtype=torch.int64, device=device)
            return MicroBatch(make_row([self.token_ids[:1]], device, kernel), nothing, np.zeros(0, np.int64), nothing)
        inputs: list[np.ndarray] = []
        scored: list[np.ndarray] = []
        for index in group:
            start = self.starts[index]
            targets = np.flatnonzero(self.scored[start : start + self.lengths[index]])
            # Nothing after the last scored token's predecessor matters.
            inputs.append(self._sequence(index)[: targets[-1]])
            scored.append(targets)
        row = make_row(inputs, device, kernel)
        predictors = np.concatenate([places[targets - 1] for places, targets in zip(row.places, scored, strict=True)])
        flat = np.concatenate([self.starts[index] + targets for index, targets in zip(group, scored, strict=True)])
        sequences = np.repeat(np.arange(len(group)), [len(targets) for targets in scored])
        return MicroBatch(row, on_device(predictors, device), flat, on_device(sequences, device))


class TokenTrace:
    """What a step found out about each of its scored tokens, in the order of its flat arrays; the others have zeros."""

    def __init__(self, tokens: StepTokens, counts: dict[str, int]) -> None:
        self.tokens = tokens
        self.counts = counts
        """Members of each component in the whole step, over all ranks: they divide its loss."""
        self.logprobs, self.entropy, self.gradients = (np.zeros(len(tokens), np.float32) for _ in range(3))
        """The gradients are those of the step's loss with respect to the logprobs."""
        self.masked: dict[str, np.ndarray] = {}
        """By component, for the losses that say so."""

    def watch(
        self, scored: np.ndarray, logprobs: torch.Tensor, entropy: torch.Tensor, masked: dict[str, torch.Tensor | None]
    ) -> None:
        """Note what a forward pass came to; the backward pass, once it runs, adds the gradients."""
        self._put(self.logprobs, scored, logprobs)
        self._put(self.entropy, scored, entropy)
        for component, flags in masked.items():
            if flags is not None:
                self._put(self.masked.setdefault(component, np.zeros(len(self.tokens), np.bool_)), scored, flags)
        logprobs.register_hook(lambda gradient: self._put(self.gradients, scored, gradient))  # type: ignore[no-untyped-call]

    def _put(self, column: np.ndarray, scored: np.ndarray, values: torch.Tensor) -> None:
        column[scored] = values.detach().cpu().numpy()


def _joined(bins: list[Bin], name: str) -> np.ndarray:
    default = STREAM_DEFAULTS[name]
    return np.concatenate([b.streams.get(name, np.full(len(b.token_ids), default, np.float32)) for b in bins])
