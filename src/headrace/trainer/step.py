"""One optimizer step: packed bins in, new parameters and metrics out.

Each component's loss is divided by the number of its member tokens in the whole step, counted over all ranks before the
first backward pass, so the gradient does not depend on how the step is cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.errors import Failure
from headrace.rollout.packing import Bin
from headrace.trainer.loss import Loss, Metrics
from headrace.trainer.model import PackedModel, Scores
from headrace.trainer.optim import Optimizer
from headrace.trainer.ranks import Ranks
from headrace.trainer.row import on_device
from headrace.trainer.tokens import COMPONENTS, MicroBatch, StepTokens, TokenTrace

MICRO_BATCH_TOKENS = 16384
"""Tokens per forward pass where memory is no concern: enough to keep the Python around each layer cheap."""


@dataclass(frozen=True)
class StepResult:
    metrics: dict[str, float]
    """`loss`, `entropy`, the losses' own metrics, all of them also by environment where there are several."""
    grad_norm: float
    tokens: int
    """Tokens of the step, context included."""
    computed_tokens: int
    """Tokens that went through the model: prefixes that several sequences share count once."""
    trace: TokenTrace | None = None
    """What was found out about each token, if it was asked for."""


class TrainStep:
    """A model, its optimizer, and the loss of each component."""

    def __init__(
        self,
        model: PackedModel,
        optimizer: Optimizer,
        losses: dict[str, Loss],
        *,
        lm_head_chunk: int,
        micro_batch_tokens: int | None = MICRO_BATCH_TOKENS,
    ) -> None:
        """`micro_batch_tokens` None: as many as the model's plan is made for."""
        self.model = model
        self.optimizer = optimizer
        self.losses = losses
        self.lm_head_chunk = lm_head_chunk
        self.micro_batch_tokens = micro_batch_tokens
        self.ranks = model.ranks

    def run(
        self,
        bins: list[Bin],
        lr: float,
        *,
        envs: Sequence[str] = (),
        traced: bool = False,
        stopped: Callable[[], bool] = lambda: False,
        on_micro_batch: Callable[[int, int], None] = lambda number, total: None,
    ) -> StepResult | None:
        """Train on all bins once. None, with nothing changed, if `stopped` says so between two micro-batches.

        `envs` names the environment of each sample that was packed. `traced` keeps what decides each token's gradient.
        `on_micro_batch` is called before each micro-batch with its number, from 1, and their total.
        """
        tokens = StepTokens(bins)
        groups = tokens.cut(self.micro_batch_tokens or self.model.plan.row_tokens)
        counts = dict(
            zip(COMPONENTS, self.ranks.sum([tokens.count(component) for component in COMPONENTS]), strict=True)
        )
        sums = _Sums()
        trace = TokenTrace(tokens, counts) if traced else None
        computed = 0
        # Every rank runs as often as the one with the most to do, and at least once: collectives must meet.
        total = max(1, self.ranks.most(len(groups)))
        for number in range(total):
            if self.ranks.any(stopped()):
                self.optimizer.discard()
                return None
            on_micro_batch(number + 1, total)
            group = groups[number] if number < len(groups) else []
            batch = tokens.micro_batch(group, self.model.device, self.model.kernel)
            loss = self._loss(tokens, batch, counts, _members_by_env(tokens, batch, envs), sums, trace)
            loss.backward()  # type: ignore[no-untyped-call]
            computed += batch.row.token_ids.shape[1]
        trained, computed = self.ranks.sum([tokens.real, computed])
        metrics = sums.means(self.ranks)
        if len(set(envs)) == 1:  # what all have is what it has
            metrics |= {f"{name}/{envs[0]}": metrics[name] for name in ("loss", "entropy") if name in metrics}
        return StepResult(metrics, self._update(lr), trained, computed, trace)

    def rehearse(self, bins: list[Bin]) -> None:
        """The passes of a step, as one micro-batch, for nothing but what they compile."""
        tokens = StepTokens(bins)
        counts = {component: tokens.count(component) for component in COMPONENTS}
        (group,) = tokens.cut(len(tokens))
        batch = tokens.micro_batch(group, self.model.device, self.model.kernel)
        self._loss(tokens, batch, counts, {}, _Sums(), None).backward()  # type: ignore[no-untyped-call]
        self.optimizer.discard()

    def _update(self, lr: float) -> float:
        """Change the parameters; the norm of the gradient. What runs out of memory here cannot be tried again."""
        try:
            return self.optimizer.step(lr)
        except torch.OutOfMemoryError as error:
            raise Failure(
                f"the optimizer ran out of memory, and some parameters may have changed already: {error}. Keep its "
                "state in CPU memory (trainer.optim.offload_state), or leave it more room (inference.kv_cache_gb)"
            ) from error

    def _loss(
        self,
        tokens: StepTokens,
        batch: MicroBatch,
        counts: dict[str, int],
        by_env: dict[str, Tensor],
        sums: _Sums,
        trace: TokenTrace | None,
    ) -> Tensor:
        """A micro-batch's share of the step's loss."""
        logprobs, entropy, total = self._score(tokens, batch)
        sums.add({"entropy": (entropy.sum(), torch.full((), len(entropy), device=entropy.device))})
        for env, inside in by_env.items():
            sums.add({f"entropy/{env}": (entropy[inside].sum(), inside.sum())})
        masked: dict[str, Tensor | None] = {}
        for component in COMPONENTS:
            if counts[component] == 0:
                continue
            inputs = tokens.loss_inputs(component, batch, logprobs)
            outputs = self.losses[component](inputs)
            total = total + outputs.loss / counts[component]
            sums.add(outputs.metrics)
            masked[component] = outputs.masked
            for env, inside in by_env.items():
                with torch.no_grad():
                    part = replace(inputs, loss_mask=inputs.loss_mask & inside)
                    outputs = self.losses[component](part)
                sums.add(outputs.metrics, f"/{env}")
                sums.add({"loss": (outputs.loss, part.loss_mask.sum())}, f"/{env}", part=component)
        sums.add_total("loss", total.detach())
        if trace is not None:
            trace.watch(batch.scored, logprobs, entropy, masked)
        return total

    def _score(self, tokens: StepTokens, batch: MicroBatch) -> Scores:
        """Logprob and entropy of each scored token, and the zero that the loss starts from."""
        device = self.model.device
        labels = on_device(tokens.token_ids[batch.scored].astype(np.int64), device)
        temperatures = on_device(tokens.temperatures[batch.scored], device)
        return self.model.score(batch.row, batch.predictors, labels, temperatures, self.lm_head_chunk)


def _members_by_env(tokens: StepTokens, batch: MicroBatch, envs: Sequence[str]) -> dict[str, Tensor]:
    """For each environment, which scored tokens are its own; nothing where there is only one."""
    names = sorted(set(envs))
    if len(names) < 2:
        return {}
    numbers = np.array([names.index(env) for env in envs])[tokens.samples_of(batch.scored)]
    return {name: on_device(numbers == number, batch.predictors.device) for number, name in enumerate(names)}


class _Sums:
    """Sums and counts by name, left on the device until the step is over."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], Tensor] = {}
        self._totals: dict[str, Tensor] = {}

    def add(self, metrics: Metrics, suffix: str = "", *, part: str = "") -> None:
        """A mean may be made of several parts, each with its own count, which add up."""
        for name, (total, count) in metrics.items():
            pair = torch.stack([total.detach().double(), count.double().to(total.device)])
            key = (name + suffix, part)
            self._pairs[key] = self._pairs[key] + pair if key in self._pairs else pair

    def add_total(self, name: str, value: Tensor) -> None:
        """A quantity whose parts, over micro-batches and ranks, add up to the value itself."""
        known = self._totals.get(name)
        self._totals[name] = value.double() if known is None else known + value

    def means(self, ranks: Ranks) -> dict[str, float]:
        """Over all ranks, which have the same names."""
        pairs = ranks.add_up(torch.stack(list(self._pairs.values()))).tolist()
        totals = ranks.add_up(torch.stack(list(self._totals.values()))).tolist()
        means: dict[str, float] = {}
        for (name, _), (total, count) in zip(self._pairs, pairs, strict=True):
            if count:
                means[name] = means.get(name, 0.0) + total / count
        return {**means, **dict(zip(self._totals, totals, strict=True))}
