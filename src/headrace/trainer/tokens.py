"""The tokens of one optimizer step as flat arrays: their loss components, and the split into micro-batches.

Alignment: values at index j belong to token j. The first token of a sequence has no prediction, so it is a member of no
component. A token is *scored* if it is a member of any component; other tokens need no logits.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch

from headrace.rollout.packing import STREAM_DEFAULTS, Bin, join_rows
from headrace.rollout.types import LATENTS, ROUTES
from headrace.trainer.loss import PackedInputs
from headrace.trainer.packed_row import Kernel, PackedRow, common_prefix, make_row, prefix_keys, sort_key, to_device

PENALTIES = ("k2", "k3")
"""Estimators of the divergence from a reference policy, on tokens of the rl component."""
COMPONENTS = ("rl", "ce", "ref_kl", *PENALTIES)
SHARED_TOKENS_PER_OWN = 8
"""Shared tokens that take as much memory as one unshared token: attention gathers their keys."""


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a step as a packed row; `scored` are indices into the step's flat arrays."""

    row: PackedRow
    predictors: torch.Tensor
    """For each scored token, the index in the row that predicts it."""
    labels: torch.Tensor
    temperatures: torch.Tensor
    scored: np.ndarray
    sequences: torch.Tensor
    """For each scored token, the number of its sequence in the micro-batch."""
    latents: torch.Tensor | None = None
    """[scored tokens, hidden size]: the latents of the labels; None if the step has none."""


class StepTokens:
    """The flat arrays of a step. Streams that no bin has stay absent and cost nothing."""

    def __init__(self, bins: list[Bin], unit_size: int = 1) -> None:
        """`unit_size`: consecutive packed samples that a micro-batch contains all or none of, next to each other."""
        self.unit_size = unit_size
        self.lengths = np.concatenate([bin.lengths for bin in bins])
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        self.sources = np.concatenate([bin.sources for bin in bins])
        self.token_ids = np.concatenate([bin.token_ids for bin in bins])
        self.mask = np.concatenate([bin.mask for bin in bins])
        self.logprobs = np.concatenate([bin.logprobs for bin in bins])
        self.versions = np.concatenate([bin.versions for bin in bins])
        self.temperatures = np.concatenate([bin.temperatures for bin in bins])
        self.streams = {
            name: np.concatenate([b.streams.get(name, np.full(len(b.mask), default, np.float32)) for b in bins])
            for name, default in STREAM_DEFAULTS.items()
            if any(name in b.streams for b in bins)
        }
        self.latents = join_rows([(len(bin.mask), bin.latents) for bin in bins], LATENTS)
        """[tokens, hidden size]; None for a policy that thinks in tokens alone."""
        self.routes = join_rows([(len(bin.mask), bin.routes) for bin in bins], ROUTES)
        """[tokens, layers * experts per token]; None without routes."""
        self._prefix_keys = prefix_keys(self.token_ids, self.latents, self.routes)
        self.members = self._members()
        self.scored = np.logical_or.reduce(list(self.members.values()))

    def __len__(self) -> int:
        return len(self.token_ids)

    def count(self, component: str) -> int:
        """Return the number of member tokens of a component; with `unit_size` above 1, of units with members."""
        members = self.members[component]
        if self.unit_size == 1:
            return int(members.sum())
        return int(np.logical_or.reduceat(members, self.starts).sum()) // self.unit_size

    def without_reference(self) -> StepTokens:
        """Return a copy whose scored tokens are those that have a penalty but no logprob of its reference.

        The reference thinks in tokens alone. It takes the policy's experts, so that equal weights have no divergence.
        """
        reference = self.streams.setdefault("kl_logprobs", np.full(len(self), np.nan, np.float32))
        penalized = np.logical_or.reduce([self.members[penalty] for penalty in PENALTIES])
        lacking = copy(self)
        lacking.latents, lacking._prefix_keys = None, prefix_keys(self.token_ids, self.routes)
        lacking.scored = penalized & np.isnan(reference)
        return lacking

    def cut(self, limit: int) -> list[list[int]]:
        """Split the trained sequences, in lexicographic order, into groups that take the memory of `limit` tokens."""
        groups: list[list[int]] = []
        size, previous = 0, np.zeros(0, np.int64)
        trained = np.flatnonzero(np.logical_or.reduceat(self.scored, self.starts)).tolist()
        units = [list(unit) for _, unit in groupby(trained, lambda index: self.sources[index] // self.unit_size)]
        for unit in sorted(units, key=lambda unit: sort_key(self._part(unit[0], self._prefix_keys))):
            sequences = [self._part(index, self._prefix_keys) for index in unit]
            others = zip(unit[1:], pairwise(sequences), strict=True)
            taken_by_others = sum(self._row_tokens(index, common_prefix(*pair)) for index, pair in others)
            taken = self._row_tokens(unit[0], common_prefix(previous, sequences[0]))
            if not groups or size + taken + taken_by_others > limit:
                groups.append([])
                size, taken = 0, self._row_tokens(unit[0], 0)
            groups[-1] += unit
            size, previous = size + taken + taken_by_others, sequences[-1]
        return groups

    def _row_tokens(self, index: int, shared: int) -> int:
        """Return the tokens that a sequence adds to a row, as a measure of memory, if `shared` are in it already."""
        own = int(self.lengths[index]) - shared + -(-shared // SHARED_TOKENS_PER_OWN)
        return max(own, int(self._part(index, self.scored).sum()))

    def loss_inputs(self, component: str, batch: MicroBatch, logprobs: torch.Tensor) -> PackedInputs:
        """Return the inputs of a component's loss for a micro-batch's scored tokens."""

        def select(values: np.ndarray) -> torch.Tensor:
            return to_device(values[batch.scored], logprobs.device)

        weights = self.streams.get(f"{component}_weights")
        reference = self.streams.get("kl_logprobs" if component in PENALTIES else "ref_logprobs")
        if reference is None and component in ("ref_kl", *PENALTIES):  # other ranks have such tokens, this one has none
            reference = np.zeros(len(self), np.float32)
        advantages = self.streams.get("advantages")
        return PackedInputs(
            logprobs,
            select(self.logprobs),
            None if reference is None else select(reference),
            torch.zeros_like(logprobs) if advantages is None else select(advantages),
            select(self.members[component]),
            None if weights is None else select(weights),
            sequences=batch.sequences,
        )

    def _members(self) -> dict[str, np.ndarray]:
        """Return by component a mask of the tokens that it trains."""
        none = np.zeros(len(self), np.bool_)
        weighted = {c: self.streams[f"{c}_weights"] != 0 for c in COMPONENTS if f"{c}_weights" in self.streams}
        first = none.copy()
        first[self.starts] = True
        rl = self.mask & weighted.get("rl", True)
        members = {"ce": none, "ref_kl": none, **weighted, "rl": rl}
        members |= {penalty: rl & weighted.get(penalty, False) for penalty in PENALTIES}
        return {component: members[component] & ~first for component in COMPONENTS}

    def _part(self, index: int, values: np.ndarray) -> np.ndarray:
        """Return the part of a flat array that belongs to a sequence."""
        part: np.ndarray = values[self.starts[index] : self.starts[index] + self.lengths[index]]
        return part

    def micro_batch(self, group: list[int], device: torch.device, kernel: Kernel = "sdpa") -> MicroBatch:
        """Pack a group into one row; for an empty group a row without scored tokens, to keep ranks in step."""
        predictors, scored = np.zeros(0, np.int64), np.zeros(0, np.int64)
        targets = [np.flatnonzero(self._part(index, self.scored)) for index in group]

        def inputs(values: np.ndarray) -> list[np.ndarray]:
            # Tokens from the last scored one on predict nothing that is trained.
            parts = [self._part(index, values)[: each[-1]] for index, each in zip(group, targets, strict=True)]
            return parts or [values[:1]]

        keys = None if self._prefix_keys is self.token_ids else inputs(self._prefix_keys)
        latents, routes = (None if rows is None else inputs(rows) for rows in (self.latents, self.routes))
        row = make_row(inputs(self.token_ids), device, kernel, keys=keys, latents=latents, routes=routes)
        if group:
            predictors = np.concatenate([places[each - 1] for places, each in zip(row.places, targets, strict=True)])
            scored = np.concatenate([self.starts[index] + each for index, each in zip(group, targets, strict=True)])
        return MicroBatch(
            row,
            to_device(predictors, device),
            to_device(self.token_ids[scored].astype(np.int64), device),
            to_device(self.temperatures[scored], device),
            scored,
            to_device(np.repeat(np.arange(len(group)), np.fromiter(map(len, targets), np.int64)), device),
            None if self.latents is None else to_device(self.latents[scored], device),
        )


@dataclass(frozen=True)
class MicroBatchTrace:
    """One micro-batch of a traced step."""

    sequences: int
    computed_tokens: int
    scored_tokens: int
    losses: dict[str, float]
    """By component, its share of the step's loss."""


class TokenTrace:
    """Values of each scored token of a step, aligned with its flat arrays; zeros for other tokens."""

    def __init__(self, tokens: StepTokens, counts: dict[str, int]) -> None:
        self.tokens = tokens
        self.counts = counts
        """Member tokens of each component over all ranks, by which its loss is divided."""
        self.logprobs, self.entropy, self.gradients = (np.zeros(len(tokens), np.float32) for _ in range(3))
        """Gradients of the step's loss with respect to the logprobs."""
        self.masked: dict[str, np.ndarray] = {}
        """Masked tokens by component, for losses that report them."""
        self.micro_batches: list[MicroBatchTrace] = []

    def record(
        self,
        batch: MicroBatch,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        masked: dict[str, torch.Tensor | None],
        losses: dict[str, torch.Tensor],
    ) -> None:
        """Record a forward pass; gradients are added when its backward pass runs."""
        scored, shares = batch.scored, {name: loss.item() for name, loss in losses.items()}
        sequences = int(batch.sequences[-1]) + 1 if len(scored) else 0
        self.micro_batches.append(MicroBatchTrace(sequences, batch.row.token_ids.shape[1], len(scored), shares))
        self._put(self.logprobs, scored, logprobs)
        self._put(self.entropy, scored, entropy)
        for component, flags in masked.items():
            if flags is not None:
                self._put(self.masked.setdefault(component, np.zeros(len(self.tokens), np.bool_)), scored, flags)
        logprobs.register_hook(lambda gradient: self._put(self.gradients, scored, gradient))  # type: ignore[no-untyped-call]

    def _put(self, column: np.ndarray, scored: np.ndarray, values: torch.Tensor) -> None:
        column[scored] = values.detach().cpu().numpy()
