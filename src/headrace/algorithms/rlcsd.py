"""RLCSD (arXiv 2606.11709): group credit, modulated per token by a contrast of correct and incorrect hints.

    A   = (r - mean(r)) / (std(r) + 1e-6)            over the group, for every token; plus length penalty and terms
    e_t = log p(t | correct hint) - log mean_k p(t | incorrect hint k)
    x_t = lam * tanh(e_t / tau)                      M: tokens with |x| > delta, U: the rest
    A_t = A + x_t on M, or 0 where that would turn the sign of A; A on U

A is the sum that `headrace.algorithms.group_credit` makes with normalize = "std": penalty and terms are centered and
not divided. A hint is the whole response of a sibling in the batch. All hints share one template, so that its effect on
the style cancels. p is the live policy's, or a frozen teacher's, for the rollout's own tokens after a
prompt with the hint in it (`headrace.algorithms.hints`). U and M are then normalized each on its own
(`headrace.rollout.credit`). A rollout that has no correct or no incorrect sibling, or whose teacher fails, keeps its
plain credit, all of it on U, and is counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from pydantic import Field, field_validator

from headrace.algorithms.base import Algorithm, CreditTerm, MakeContext, RolloutView, Survivor, assign
from headrace.algorithms.group_credit import CreditTermsConfig, GroupCredit
from headrace.algorithms.hints import Hints, draw_siblings, replies, response_text
from headrace.algorithms.teacher import TaughtAlgorithm
from headrace.config.algorithms import ALGORITHMS, ImportConfig, Promises, check_template
from headrace.config.model import TeacherReference
from headrace.imports import load_function
from headrace.inference.client.reference import Reference, ReferenceFailed
from headrace.rollout.credit import contrast, fold, modulate, rollout_mean
from headrace.rollout.types import Rollout

log = logging.getLogger(__name__)

PLACEHOLDER = "{response}"
BATCHES_WITHOUT_CONTRAST = 5
"""The user is notified each time this many batches in a row had no contrast."""
TEMPLATE = """\
Here is a reference solution of the problem below, with its final answer:

{response}

Understand it. Then solve the problem below yourself, step by step, and give your final answer."""


@ALGORITHMS.register
class RlcsdConfig(CreditTermsConfig):
    """Standardized group credit, modulated per token by what correct and incorrect siblings would have made of it."""

    CREDIT = "`(r_i - mean(r)) / (std(r) + 1e-6)`, moved token by token by a contrast of hints (arXiv 2606.11709)"
    RENDERER_FOR = "puts hints before each sample"
    UNSCORED = "left with their plain credit"

    type: Literal["rlcsd"] = "rlcsd"
    teacher: TeacherReference = "policy"
    """The model that scores with hints before the sample: the live policy, `{ every = N }`: the policy after a step
    that N divides, on a further server of the run, or a frozen model."""
    correct_threshold: float = 1.0
    """The reward from which a sibling is correct."""
    min_contrast_gap: float = Field(0.0, ge=0)
    """How far below `correct_threshold` a sibling's reward must be to be incorrect."""
    num_negative_hints: int = Field(4, ge=1)
    """Incorrect siblings that are hints, at most."""
    lam: float = Field(0.5, ge=0)
    """The most that the contrast moves a token's advantage by."""
    tau: float = Field(0.02, gt=0)
    """How sharply it does: an advantage moves by lam * tanh(contrast / tau)."""
    delta: float = Field(0.02, ge=0)
    """A token that would move by no more than this keeps its plain credit."""
    eta: float = Field(1.0, ge=0)
    """Weight of the tokens that were moved, relative to the others."""
    normalization: Literal["fold", "rollout_mean"] = "fold"
    """What counts equally: with `fold` every token, with `rollout_mean` every rollout."""
    template: str | None = None
    """The message before the sample, with {response} in it; unset: see `headrace.algorithms.rlcsd`."""
    hint_filter: ImportConfig | None = None
    """A function that narrows the siblings that may be hints."""
    max_concurrent: int = Field(32, ge=1)
    """Requests to the teacher at once."""

    def make(self, context: MakeContext) -> Rlcsd:
        return Rlcsd(self, context.reference(self.teacher), self.make_credit(context), self._load_filter())

    def check_imports(self) -> None:
        super().check_imports()
        self._load_filter()

    def promises(self, algorithm: Algorithm) -> Promises:
        base = super().promises(algorithm)
        reasons = {name: reason for name, reason in base.reasons.items() if name != "signs"}
        return msgspec.structs.replace(base, kept=base.kept | {"signs"}, reasons=reasons)

    def _load_filter(self) -> Callable[..., Any] | None:
        own = self.hint_filter
        return None if own is None else load_function(own.import_path, own.kwargs, "hint_filter of rlcsd")

    @field_validator("template")
    @classmethod
    def _has_placeholder(cls, template: str | None) -> str | None:
        return check_template(template, PLACEHOLDER)


class Rlcsd(TaughtAlgorithm):
    modulates = ("signs",)

    def __init__(
        self,
        config: RlcsdConfig | None = None,
        teacher: Reference | None = None,
        credit: GroupCredit | None = None,
        hint_filter: Callable[[Rollout], Any] | None = None,
    ) -> None:
        self._config = config = config or RlcsdConfig()
        super().__init__(teacher, config.max_concurrent, config.UNSCORED)
        self._credit = credit or GroupCredit(normalize="std")
        self._hint_filter = hint_filter
        self._without_contrast = 0
        """Consecutive batches in which no group had a contrast."""

    async def score_rollout(self, rollout: RolloutView) -> None:
        """Raise for a rollout without a response, which could not be a hint for its siblings."""
        if not replies(rollout.rollout):
            raise ValueError(
                f"a rollout of task {rollout.task.key} of {rollout.task.env} has no assistant message: rlcsd shows a "
                "rollout's response to its siblings, so the environment must fill in `messages`"
            )

    def credit_terms(self, group: Sequence[RolloutView]) -> list[CreditTerm]:
        return self._credit.terms(group, self.tally)

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        assign(group, self._credit.advantages(group, self.tally))

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        config, rollouts = self._config, [survivor.rollout for survivor in batch]
        evidence = await self._evidence(rollouts)
        tokens = sum(int(sample.mask.sum()) for rollout in rollouts for sample in rollout.samples)
        for rollout, e in zip(rollouts, evidence, strict=True):
            await asyncio.sleep(0)  # let rollouts arrive while a large batch is processed
            credit = [sample.streams["advantages"][sample.mask] for sample in rollout.samples]
            advantages = np.concatenate(credit).astype(np.float64)
            modulated = np.zeros(len(advantages), np.bool_)
            if e is not None:
                advantages, modulated = modulate(advantages, e, config.lam, config.tau, config.delta)
            if config.normalization == "fold":
                advantages, multiplier = fold(advantages, modulated, config.eta)
            else:
                advantages, multiplier = rollout_mean(advantages, modulated, config.eta, tokens, len(rollouts))
            _write_credit(rollout, advantages)
            self.tally.mean("modulated_fraction", float(modulated.sum()), len(modulated))
            self.tally.largest("largest_multiplier", multiplier)

    async def _evidence(self, rollouts: Sequence[Rollout]) -> list[np.ndarray | None]:
        """Return the contrast `e` on the trainable tokens of each rollout; None if hints or scores are missing."""
        config = self._config
        hints = Hints(self.host, TEMPLATE if config.template is None else config.template, PLACEHOLDER)
        thresholds = config.correct_threshold, config.correct_threshold - config.min_contrast_gap
        drawn = draw_siblings(rollouts, *thresholds, config.num_negative_hints, self.host.seed, self._hint_filter)
        pairs = list(zip(rollouts, drawn, strict=True))
        jobs = [
            (await hints.prompt(rollout, sample, response_text(sibling)), sample)
            for rollout, siblings in pairs
            for sibling in siblings
            for sample in rollout.samples
        ]
        self.report_separate_hints(hints.separate)
        outcomes = await self._scorer.score(jobs)
        scored = iter(outcomes)
        evidence: list[np.ndarray | ReferenceFailed | None] = []
        for rollout, siblings in pairs:
            await asyncio.sleep(0)  # let rollouts arrive while a large batch is processed
            evidence.append(_contrast(rollout, len(siblings), scored) if siblings else None)
        failures = [failure for failure in evidence if isinstance(failure, ReferenceFailed)]
        available = sum(map(bool, drawn))
        self.tally.mean("contrast_available", available, len(drawn))
        self.tally.count("no_contrast", len(drawn) - available)
        self.tally.count("prefills", sum(not isinstance(outcome, ReferenceFailed) for outcome in outcomes))
        self.tally.count("teacher_failed", len(failures))
        self._report_contrast(rollouts, drawn)
        if failures:
            message = "%s: no contrast for %d rollouts, which keep their plain credit: %s"
            log.warning(message, self.host.env, len(failures), failures[-1])
        return [None if isinstance(e, ReferenceFailed) else e for e in evidence]

    def _report_contrast(self, rollouts: Sequence[Rollout], drawn: Sequence[Sequence[Rollout]]) -> None:
        """Log how many groups had a contrast, and notify the user after several batches without any."""
        groups = {rollout.group_id for rollout in rollouts}
        contrasted = {rollout.group_id for rollout, siblings in zip(rollouts, drawn, strict=True) if siblings}
        log.info("%s: %d of %d groups had a contrast", self.host.env, len(contrasted), len(groups))
        self._without_contrast = 0 if contrasted else self._without_contrast + 1
        if self._without_contrast % BATCHES_WITHOUT_CONTRAST == 0 and not contrasted:
            self.host.notify(
                f"{self.host.env}: no group of the last {self._without_contrast} batches had both a correct and an "
                "incorrect rollout, so that rlcsd gives plain group credit: check algo.correct_threshold against the "
                "rewards, take tasks that are solved sometimes, or raise group_size"
            )


def _contrast(
    rollout: Rollout, hints: int, outcomes: Iterator[np.ndarray | ReferenceFailed]
) -> np.ndarray | ReferenceFailed:
    """Consume a rollout's outcomes, per hint (the correct one first) those of every sample; return its contrast."""
    rows: list[np.ndarray] = []
    failure = None
    for _ in range(hints):
        scores = []
        for sample in rollout.samples:
            if isinstance(outcome := next(outcomes), ReferenceFailed):
                failure = outcome
            else:
                scores.append(outcome[sample.mask])
        rows.append(np.concatenate(scores) if failure is None else np.empty(0))
    return contrast(rows[0], np.array(rows[1:])) if failure is None else failure


def _write_credit(rollout: Rollout, advantages: np.ndarray) -> None:
    """Set the advantages of the trainable tokens, samples end to end."""
    start = 0
    for sample in rollout.samples:
        stream = sample.streams["advantages"].copy()
        end = start + int(sample.mask.sum())
        stream[sample.mask] = advantages[start:end]
        sample.set_stream("advantages", stream)
        start = end
