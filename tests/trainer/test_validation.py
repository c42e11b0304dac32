"""The validation loss: against the model's own forward pass, on one rank and on two, and how it is stopped."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.errors import DataError
from headrace.rollout.types import Sample
from headrace.trainer.model import PackedModel
from headrace.trainer.sft import Validation
from tests.refusals import refused
from tests.trainer.training_samples import ARCHITECTURES, make_sample, write_random_model
from tests.trainer.validation_program import losses_around_a_step, supervised_samples

PROGRAM = Path(__file__).parent / "validation_program.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), ARCHITECTURES["qwen3"])


def plain_loss(directory: Path, samples: list[Sample], seq_len: int) -> float:
    """Each sample alone through the model as it is; no packing, no padding."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    losses = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids[:seq_len].astype("int64"))
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        learned = [place for place in range(1, len(ids)) if sample.mask[place]]
        losses += [-logprobs[place - 1, ids[place]].item() for place in learned]
    return sum(losses) / len(losses)


def validation_of(directory: Path, samples: list[Sample], seq_len: int = 32) -> Validation:
    return Validation(PackedModel(directory, lm_head_chunk=16), samples, seq_len)


@pytest.mark.parametrize("seq_len", [64, 12])
def test_the_loss_is_the_mean_over_learned_tokens_whatever_is_packed_or_cut(directory: Path, seq_len: int):
    samples = supervised_samples(1, 9)
    means = validation_of(directory, samples, seq_len).measure()
    assert means == pytest.approx({"loss": plain_loss(directory, samples, seq_len)}, rel=1e-5)


def test_validating_leaves_no_gradient(directory: Path):
    model = PackedModel(directory)
    Validation(model, supervised_samples(1, 3), 32).measure()
    assert all(parameter.grad is None for parameter in model.named_parameters().values())


def test_a_stop_leaves_no_loss(directory: Path):
    assert validation_of(directory, supervised_samples(1, 2)).measure(stopped=lambda: True) is None


def test_examples_without_anything_to_learn_are_refused(directory: Path):
    zeros = [0.0] * 9
    sample = make_sample([1] * 9, 8, rl_weights=zeros, ce_weights=[*zeros[1:], 1.0])
    with refused(DataError, key="seq_len", value=8):
        validation_of(directory, [sample], seq_len=8)


@pytest.mark.full
def test_two_ranks_come_to_the_loss_of_one_before_a_step_and_after_it(directory: Path):
    done = subprocess.run([sys.executable, *TORCHRUN, PROGRAM, directory], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (before, after), alone = json.loads(done.stdout), losses_around_a_step(directory)
    assert before == pytest.approx([plain_loss(directory, supervised_samples(*n), 32) for n in ((1, 7), (2, 1))])
    assert before == pytest.approx(alone[0], rel=1e-5)
    assert after == pytest.approx(alone[1], rel=1e-5)  # parameters may differ where a gradient is near Adam's eps
    assert after != pytest.approx(before, rel=1e-3)
