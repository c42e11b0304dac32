"""The KL penalty between the policy and a reference policy, estimated from the sampled tokens.

    k1 = t - ref        k2 = (t - ref)^2 / 2        k3 = exp(ref - t) - (ref - t) - 1

place = "loss": `coef` is the weight of each sampled token in the loss k2 or k3, in which t is the logprob of the policy
in training; `ratio` multiplies it by the ratio to the policy that sampled. A frozen model scores the samples of a batch
here; the trainer keeps the policies of the run's own past.

place = "reward": coef * (the sum of k over the sampled tokens) is subtracted from the reward before rollouts are
compared, so baselines contain it; t is the logprob of sampling. Rewards in metrics and files stay without it. The start
of the run is scored by a further server of the run: with an adapter, its base model.

Left out on purpose: a coefficient that adapts to a target distance.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.algorithms.base import Algorithm, Host, MakeContext, RolloutView, Survivor
from headrace.algorithms.teacher import Scorer, own_prompt_job
from headrace.config.algorithms import AlgorithmConfig, KlConfig
from headrace.config.model import FrozenModelConfig
from headrace.inference.client.reference import Reference, ReferenceFailed
from headrace.rollout.types import Rollout

METRIC = "reference_kl"
"""The metric of a rollout: the estimated KL divergence, summed over its sampled tokens."""


def make_algorithm(config: AlgorithmConfig, context: MakeContext) -> Algorithm:
    """Return an algorithm with its KL penalty, if any; it still needs `start`."""
    algorithm: Algorithm = config.make(context)
    kl: KlConfig | None = getattr(config, "kl", None)
    if kl is not None and kl.coef > 0:
        frozen = context.connect(kl.reference) if isinstance(kl.reference, FrozenModelConfig) else None
        algorithm.kl = KlPenalty(kl, frozen or (context.past if kl.place == "reward" else None))
    return algorithm


class KlPenalty:
    """The KL penalty of one environment's algorithm: in the reward, or as weights of a loss."""

    def __init__(self, config: KlConfig, reference: Reference | None) -> None:
        """`reference`: scores samples; None if the trainer does so with its own copy."""
        self._config = config
        self.in_reward = config.place == "reward"
        self._reference = reference
        self._scorer = None if reference is None else Scorer(reference)

    async def start(self, host: Host) -> None:
        """Raise `BadInput` if the reference cannot score samples."""
        if self._reference is not None:
            await self._reference.check(host.tokenizer, host.seq_len, host.temperature)

    async def stop(self) -> None:
        if self._reference is not None:
            await self._reference.close()

    async def measure(self, rollout: Rollout) -> None:
        """Set the metric of a new rollout, if the penalty is in the reward. Raises `ReferenceFailed`."""
        if not self.in_reward:
            return
        assert self._scorer is not None, "a penalty in the reward has a reference on a server"
        distance = 0.0
        outcomes = await self._scorer.score([own_prompt_job(sample) for sample in rollout.samples])
        for sample, outcome in zip(rollout.samples, outcomes, strict=True):
            if isinstance(outcome, ReferenceFailed):
                raise outcome
            distance += float(estimate(self._config.estimator, sample.logprobs, outcome)[sample.mask].sum())
        rollout.metrics[METRIC] = distance

    def charge(self, view: RolloutView) -> RolloutView:
        """Return a view with the penalty subtracted from its reward, if it belongs there; samples are shared."""
        if not self.in_reward:
            return view
        reward = view.reward - self._config.coef * view.rollout.metrics[METRIC]
        return RolloutView(msgspec.structs.replace(view.rollout, reward=reward), view.task)

    def weigh(self, group: Sequence[RolloutView]) -> None:
        """Set the penalty's loss weight on every sampled token; the trainer ignores tokens outside the rl loss."""
        if not self.in_reward:
            for sample in (sample for view in group for sample in view.samples):
                sample.set_stream(f"{self._config.estimator}_weights", sample.mask * self._config.coef)

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        """Set a frozen model's logprobs for a penalty in the loss; drop a rollout that is not scored completely."""
        if self._scorer is not None and not self.in_reward:
            await self._scorer.set_stream("kl_logprobs", [survivor for survivor in batch if not survivor.drop_reason])


def estimate(estimator: str, logprobs: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the estimate (k1, k2 or k3) of the divergence at each token, float64."""
    gap = reference.astype(np.float64) - logprobs
    estimates: dict[str, np.ndarray] = {"k1": -gap, "k2": gap**2 / 2, "k3": np.expm1(gap) - gap}
    return estimates[estimator]
