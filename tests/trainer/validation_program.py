"""What each rank of a test runs: validate, train a step, validate again."""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from headrace.rollout.packing import pack_for_worker
from headrace.rollout.types import NOT_SAMPLED, Sample
from headrace.trainer.loss import ce_loss
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer
from headrace.trainer.ranks import Ranks, destroy_process_group
from headrace.trainer.sft import Validation
from headrace.trainer.step import TrainStep


def supervised_samples(seed: int, count: int) -> list[Sample]:
    """Mixed lengths; the learned tokens are those of a last turn and some before it."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        length = int(rng.integers(6, 30))
        learned = (rng.random(length) < 0.3) | (np.arange(length) >= length - 3)
        sample = Sample(
            rng.integers(0, 96, length), learned, np.zeros(length), np.full(length, NOT_SAMPLED), int(learned.argmax())
        )
        sample.set_stream("ce_weights", learned.astype(np.float32))
        sample.set_stream("rl_weights", np.zeros(length, np.float32))
        samples.append(sample)
    return samples


def measured_loss(validation: Validation) -> float | None:
    means = validation.measure()
    return None if means is None else means["loss"]


def losses_around_a_step(directory: Path) -> list[list[float | None]]:
    """Of seven examples and of a single one, which leaves a rank without any: before the step, and after it."""
    ranks = Ranks()
    model = PackedModel(directory, ranks, lm_head_chunk=16)
    sets = [supervised_samples(seed, count) for seed, count in ((1, 7), (2, 1))]
    validations = [Validation(model, s, 32) for s in sets]
    step = TrainStep(model, Optimizer(model.named_parameters()), {"ce": ce_loss})
    before = [measured_loss(validation) for validation in validations]
    step.run(pack_for_worker(ranks.index, supervised_samples(0, 5), 32, ranks.size, model.cost), 1e-2)
    return [before, [measured_loss(validation) for validation in validations]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    output = json.dumps(losses_around_a_step(Path(sys.argv[1])))
    if Ranks().is_first:
        print(output)
    destroy_process_group()
