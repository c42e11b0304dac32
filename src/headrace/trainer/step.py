"""One optimizer step: packed bins in, new parameters and metrics out.

Each component's loss is divided by the number of its member tokens in the whole step, or of its pairs where the loss is
one of pairs, counted over all ranks before the first backward pass, so the gradient does not depend on the split into
micro-batches and ranks. Penalties are divided by the tokens of the rl component, so that their weight relative to it is
the same in any mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from headrace.errors import BadInput, Failure
from headrace.observe.histograms import BOUNDS, Counts
from headrace.rollout.packing import NO_SAMPLE, Bin
from headrace.trainer.loss import Loss, Metrics, PackedInputs
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer
from headrace.trainer.packed_row import to_device
from headrace.trainer.ranks import Ranks
from headrace.trainer.reference import ReferenceWeights
from headrace.trainer.routing import RoutingMetrics, summarize_layers
from headrace.trainer.tokens import COMPONENTS, PENALTIES, MicroBatch, StepTokens, TokenTrace

MICRO_BATCH_TOKENS = 16384
"""Default tokens per forward pass: enough to amortize Python overhead per layer."""
MAX_LOG_RATIO = 30.0
"""Larger ones are counted as this, so that their sum is finite."""


@dataclass(frozen=True)
class StepResult:
    """The metrics of one optimizer step, over all ranks."""

    metrics: dict[str, float]
    """`loss`, `entropy` and the metrics of the losses; also by environment if there are several."""
    grad_norm: float
    tokens: int
    """Tokens of the step, context included."""
    computed_tokens: int
    """Tokens that went through the model: shared prefixes count once."""
    histograms: dict[str, str]
    """As they are recorded: `histogram/ratio`, if there are policy gradients."""
    trace: TokenTrace | None = None
    """Per-token values, if `traced`."""
    routing: dict[str, dict[int, float]] = field(default_factory=dict)
    """Metrics of routers by layer; empty without experts."""


class TrainStep:
    """The training step of a model with its optimizer and the loss of each component."""

    def __init__(
        self,
        model: PackedModel,
        optimizer: Optimizer,
        losses: dict[str, Loss],
        micro_batch_tokens: int | None = MICRO_BATCH_TOKENS,
        reference: ReferenceWeights | None = None,
        *,
        unit_size: int = 1,
    ) -> None:
        """`micro_batch_tokens` None: the row size of the model's memory plan. `unit_size`: see `StepTokens`."""
        self.reference, self.unit_size = reference, unit_size
        self.model, self.optimizer, self.losses = model, optimizer, losses
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
        on_gradients: Callable[[], None] = lambda: None,
    ) -> StepResult | None:
        """Train on all bins once; return None, with nothing changed, if `stopped` between two micro-batches.

        `envs` are the environments of the packed samples. `traced` keeps the values behind each token's gradient.
        `on_micro_batch` is called before each micro-batch with its number, from 1, and the total, `on_gradients` when
        the optimizer's parameters have their gradients, before the update.
        """
        tokens = StepTokens(bins, self.unit_size)
        row_tokens = self.micro_batch_tokens or self.model.plan.row_tokens
        own_counts = [tokens.count(component) for component in COMPONENTS]
        counts = dict(zip(COMPONENTS, self.ranks.sum(own_counts), strict=True))
        penalized = any(counts[penalty] for penalty in PENALTIES)
        if penalized and not self._score_by_reference(tokens, row_tokens, stopped, on_micro_batch):
            return None
        groups = tokens.cut(row_tokens)
        sums, routing = MetricSums(), RoutingMetrics()
        trace = TokenTrace(tokens, counts) if traced else None
        computed = 0
        # Every rank runs the same number of micro-batches, at least one, since they run collectives.
        total = max(1, self.ranks.max(len(groups)))
        for number in range(total):
            if self.ranks.any(stopped()):
                self.optimizer.zero_grad()
                return None
            on_micro_batch(number + 1, total)
            group = groups[number] if number < len(groups) else []
            batch = tokens.micro_batch(group, self.model.device, self.model.kernel)
            loss = self._loss(tokens, batch, counts, self._env_masks(tokens, batch, envs), sums, trace)
            routing.add(self.model.routing.statistics, counts=bool(group))
            loss.backward()  # type: ignore[no-untyped-call]
            computed += batch.row.token_ids.shape[1]
        without_padding = int(tokens.lengths[tokens.sources != NO_SAMPLE].sum())
        trained, computed = self.ranks.sum([without_padding, computed])
        by_layer = routing.by_layer(self.ranks)
        metrics = sums.means(self.ranks) | summarize_layers(by_layer)
        if len(set(envs)) == 1:  # then its metrics are those of all
            metrics |= {f"{name}/{envs[0]}": metrics[name] for name in ("loss", "entropy") if name in metrics}
        on_gradients()
        try:
            grad_norm = self.optimizer.step(lr)
        except torch.OutOfMemoryError as error:  # not retried: some parameters may have changed
            raise Failure(
                f"the optimizer ran out of memory, and some parameters may have changed already: {error}. Keep its "
                "state in CPU memory (trainer.optim.offload_state), or leave it more room (inference.kv_cache_gb)"
            ) from error
        return StepResult(metrics, grad_norm, trained, computed, sums.histograms(self.ranks), trace, by_layer)

    def _score_by_reference(
        self, tokens: StepTokens, row_tokens: int, stopped: Callable[[], bool], progress: Callable[[int, int], None]
    ) -> bool:
        """Fill in the logprobs of the reference that tokens lack; return False if `stopped`."""
        lacking = tokens.without_reference()
        groups = lacking.cut(row_tokens)
        total = self.ranks.max(len(groups))
        if total == 0:
            return True
        if self.reference is None:
            fact = "tokens have k2_weights or k3_weights and no kl_logprobs, and the trainer keeps no reference"
            raise BadInput(fact, key="trainer.reference", fix='Set orchestrator.algo.kl.reference = "start".')
        with self.reference.swapped_in():
            for number in range(total):
                if self.ranks.any(stopped()):
                    return False
                progress(number + 1, total)
                group = groups[number] if number < len(groups) else []
                batch = lacking.micro_batch(group, self.model.device, self.model.kernel)
                logprobs = self.model.logprobs(batch.row, batch.predictors, batch.labels, batch.temperatures)
                tokens.streams["kl_logprobs"][batch.scored] = logprobs.float().cpu().numpy()
        return True

    def warm_up(self, bins: list[Bin]) -> None:
        """Run forward and backward of a step as one micro-batch and discard the gradients, to compile kernels."""
        tokens = StepTokens(bins)
        counts = {component: tokens.count(component) for component in COMPONENTS}
        (group,) = tokens.cut(len(tokens))
        batch = tokens.micro_batch(group, self.model.device, self.model.kernel)
        self._loss(tokens, batch, counts, {}, MetricSums(), None).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()

    def _loss(
        self,
        tokens: StepTokens,
        batch: MicroBatch,
        counts: dict[str, int],
        by_env: dict[str, Tensor],
        sums: MetricSums,
        trace: TokenTrace | None,
    ) -> Tensor:
        """Return a micro-batch's share of the step's loss."""
        scores = self.model.score(batch.row, batch.predictors, batch.labels, batch.temperatures, batch.latents)
        logprobs, entropy, total, gates = scores
        sums.add({name: _sum_and_count(values) for name, values in gates.items()})
        sums.add({"entropy": _sum_and_count(entropy)})
        for env, inside in by_env.items():
            sums.add({f"entropy/{env}": (entropy[inside].sum(), inside.sum())})
        masked: dict[str, Tensor | None] = {}
        losses: dict[str, Tensor] = {}
        for component in COMPONENTS:
            if counts[component] == 0:
                continue
            inputs = tokens.loss_inputs(component, batch, logprobs)
            outputs = self.losses[component](inputs)
            losses[component] = outputs.loss / counts["rl" if component in PENALTIES else component]
            total = total + losses[component]
            sums.add(outputs.metrics)
            if component == "rl":
                sums.add_ratios(inputs)
            masked[component] = outputs.masked
            for env, inside in by_env.items():
                with torch.no_grad():
                    part = replace(inputs, loss_mask=inputs.loss_mask & inside)
                    outputs = self.losses[component](part)
                sums.add(outputs.metrics, f"/{env}")
                sums.add({"loss": (outputs.loss, part.loss_mask.sum())}, f"/{env}", part=component)
        sums.total_loss = sums.total_loss + total.detach().double()
        if trace is not None:
            trace.record(batch, logprobs, entropy, masked, losses)
        return total

    @staticmethod
    def _env_masks(tokens: StepTokens, batch: MicroBatch, envs: Sequence[str]) -> dict[str, Tensor]:
        """Return for each environment a mask of its scored tokens; empty if there is only one environment."""
        names = sorted(set(envs))
        if len(names) < 2:
            return {}
        samples = tokens.sources[np.searchsorted(tokens.starts, batch.scored, side="right") - 1]
        numbers = np.array([names.index(env) for env in envs])[samples]
        return {name: to_device(numbers == number, batch.predictors.device) for number, name in enumerate(names)}


def _sum_and_count(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.sum(), torch.full((), len(values), device=values.device)


@cache
def _ratio_bounds(device: torch.device) -> Tensor:
    """Return the bounds of the histogram's bins; copied to a GPU once, since the copy waits for what runs there."""
    return torch.tensor(BOUNDS["ratio"], dtype=torch.float64, device=device)


class MetricSums:
    """Sums and counts of metrics by name, on the device until the end of the step."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], Tensor] = {}
        self.total_loss: Tensor | float = 0.0
        self._ratios: Tensor | None = None
        """Tokens in each bin of the histogram, then the sum of their ratios."""

    def add(self, metrics: Metrics, suffix: str = "", *, part: str = "") -> None:
        """Add sums and counts. A metric may be a sum of several parts, each a mean with its own count."""
        for name, (total, count) in metrics.items():
            pair = torch.stack([total.detach().double(), count.double().to(total.device)])
            key = (name + suffix, part)
            self._pairs[key] = self._pairs[key] + pair if key in self._pairs else pair

    def add_ratios(self, inputs: PackedInputs) -> None:
        """Count the ratios of the members, without waiting for the device."""
        members = inputs.loss_mask
        gap = inputs.trainer_logprobs.detach() - inputs.inference_logprobs
        ratios = gap.where(members, 0.0).clamp(max=MAX_LOG_RATIO).exp().double()
        bounds = _ratio_bounds(ratios.device)
        if self._ratios is None:
            self._ratios = ratios.new_zeros(len(bounds) + 2)
        self._ratios.index_add_(0, torch.bucketize(ratios, bounds), members.double())
        self._ratios[-1] += (ratios * members).sum()

    def histograms(self, ranks: Ranks) -> dict[str, str]:
        """Return the histograms over all ranks."""
        if self._ratios is None:
            return {}
        *counts, total = ranks.all_reduce(self._ratios).tolist()
        return {"histogram/ratio": Counts(np.array(counts, np.int64), total).encode()}

    def means(self, ranks: Ranks) -> dict[str, float]:
        """Return the means over all ranks, which have the same names, and the total loss."""
        assert isinstance(self.total_loss, Tensor)
        pairs = ranks.all_reduce(torch.stack(list(self._pairs.values()))).tolist()
        loss = ranks.all_reduce(self.total_loss[None]).item()
        means: dict[str, float] = {}
        for (name, _), (total, count) in zip(self._pairs, pairs, strict=True):
            if count:
                means[name] = means.get(name, 0.0) + total / count
        return {**means, "loss": loss}
