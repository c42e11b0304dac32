"""How hard tokens pull, by hand."""

import numpy as np
import pytest

from headrace.rollout.routing import GradientShare, gradient_shares, token_gradients
from headrace.rollout.types import Rollout, Sample
from tests.rollout.strategies import sample


def test_plain_credit_pulls_by_its_size_at_every_sampled_token():
    first = sample(1, 2, advantages=[0, 0.5, 0.5])
    second = sample(2, 1, advantages=[0, 0, -2])
    assert gradient_shares(Rollout(samples=[first, second])) == {"rl": GradientShare(3.0, 3)}


def test_a_weight_scales_and_zero_is_no_member():
    weighted = sample(1, 3, advantages=[0, 1, 1, 1], rl_weights=[1, 2, 0, 0.5])
    assert gradient_shares(Rollout(samples=[weighted])) == {"rl": GradientShare(2.5, 2)}


def test_cross_entropy_pulls_by_its_weight_wherever_it_stands():
    observed = sample(2, 2, advantages=[0, 0, 1, -1], ce_weights=[0, 0.25, 0, 0.5])
    assert gradient_shares(Rollout(samples=[observed])) == {"rl": GradientShare(2.0, 2), "ce": GradientShare(0.75, 2)}


def test_the_share_of_a_ref_kl_token_is_its_distance_from_the_sampled_logprob():
    # sampled at -0.5: distances 0.25 and 1
    scored = sample(1, 2, rl_weights=[0, 0, 0], ref_kl_weights=[0, 1, 0.5], ref_logprobs=[0, -0.25, -1.5])
    assert gradient_shares(Rollout(samples=[scored])) == {"ref_kl": GradientShare(0.75, 2)}


def test_the_first_token_of_a_sequence_is_never_trained():
    assert gradient_shares(Rollout(samples=[sample(0, 2, advantages=[1, 1])])) == {"rl": GradientShare(1.0, 1)}


@pytest.mark.parametrize(
    ("streams", "words"),
    [({}, "advantages"), ({"ref_kl_weights": [0, 1, 1]}, "ref_logprobs")],
)
def test_members_without_what_they_are_trained_with_are_refused(streams: dict[str, list[float]], words: str):
    credited = {"advantages": [0, 1, 1], **streams} if streams else {}
    with pytest.raises(ValueError, match=words):
        gradient_shares(Rollout(samples=[sample(1, 2, **credited)]))


def test_the_gradient_of_a_penalty_is_that_of_its_formula():
    sample = Sample([1, 2, 3], [False, True, True], [0.0, -1.0, -2.0], [-1, 0, 0], 1)
    sample.set_stream("advantages", [0.0, 0.5, 0.5])
    sample.set_stream("k3_weights", [0.0, 0.1, 0.1])
    assert token_gradients(sample)["k3"][1].tolist() == [0.0, 0.0]  # only the trainer knows its reference
    sample.set_stream("kl_logprobs", [np.nan, -1.5, np.nan])
    members, sizes = token_gradients(sample)["k3"]
    assert members.tolist() == [1, 2]
    assert sizes == pytest.approx([0.1 * (1 - np.exp(-0.5)), 0.0], abs=1e-7)
