"""Filters (spec, "Filters")."""

import math

import numpy as np
import pytest

from headrace.orchestrator.filters import has_no_advantage, is_gibberish, is_repetitive
from headrace.rollout.types import NOT_SAMPLED, Rollout, Sample

VOCAB = 1000
FLOOR = -math.log(VOCAB) - 2.0  # -8.9078


def rollout(
    tokens: list[int], logprobs: list[float], mask: list[bool] | None = None, **streams: list[float]
) -> Rollout:
    sample = Sample(tokens, mask or [True] * len(tokens), logprobs, [0] * len(tokens), 0)
    for name, values in streams.items():
        sample.set_stream(name, values)
    return Rollout(samples=[sample])


@pytest.mark.parametrize(
    ("token", "logprob", "found"),
    [
        (501, FLOOR - 0.01, True),
        (500, FLOOR - 0.01, False),  # not above the threshold
        (501, FLOOR + 0.01, False),  # not below the floor
        (3, -20.0, False),  # a common token may be a surprise
    ],
)
def test_gibberish_is_a_rare_token_below_the_floor(token: int, logprob: float, found: bool):
    assert is_gibberish(rollout([1, token, 2], [-1, logprob, -1]), VOCAB, 500, 2.0) is found


def test_gibberish_in_a_prompt_is_not_the_policys():
    observed = rollout([900, 1], [-20.0, -1.0], mask=[False, True])
    assert not is_gibberish(observed, VOCAB, 500, 2.0)


def test_gibberish_is_found_in_any_sample():
    both = Rollout(samples=rollout([1], [-1.0]).samples + rollout([900], [-20.0]).samples)
    assert is_gibberish(both, VOCAB, 500, 2.0)


def test_repetition_is_a_full_window_of_near_certain_tokens():
    sure, unsure = math.log(0.995), math.log(0.9)
    assert is_repetitive(rollout([1] * 4, [sure] * 4), 4, 0.99)
    assert not is_repetitive(rollout([1] * 4, [sure] * 3 + [unsure]), 4, 0.99)
    assert not is_repetitive(rollout([1] * 7, [sure] * 3 + [unsure] + [sure] * 3), 4, 0.99)
    assert is_repetitive(rollout([1] * 5, [unsure] + [sure] * 4), 4, 0.99)


def test_how_certain_another_model_was_is_not_known():
    taught = rollout([1] * 4, [0.0] * 4)
    taught.samples[0].versions[:] = NOT_SAMPLED
    assert not is_repetitive(taught, 4, 0.99)


def test_a_probability_of_exactly_the_threshold_is_not_above_it():
    assert not is_repetitive(rollout([1] * 4, [math.log(0.5)] * 4), 4, 0.5)


def test_a_streak_spans_turns_and_skips_what_the_policy_did_not_sample():
    sure = math.log(0.995)
    turns = rollout([1, 2, 3, 4, 5], [sure, sure, 0.0, sure, sure], mask=[True, True, False, True, True])
    assert is_repetitive(turns, 4, 0.99)
    assert not is_repetitive(turns, 5, 0.99)


def test_a_streak_spans_the_samples_of_a_split_rollout():
    sure = math.log(0.995)
    split = Rollout(samples=rollout([1, 2], [sure] * 2).samples + rollout([3, 4], [sure] * 2).samples)
    assert is_repetitive(split, 4, 0.99)


def test_an_all_zero_credit_is_no_advantage():
    assert has_no_advantage(rollout([1, 2], [-1, -1], advantages=[0, 0]))
    assert not has_no_advantage(rollout([1, 2], [-1, -1], advantages=[0, 0.1]))


def test_credit_on_tokens_that_are_not_trained_does_not_count():
    assert has_no_advantage(rollout([1, 2], [0, -1], mask=[False, True], advantages=[1, 0]))


def test_one_credited_sample_keeps_the_rollout():
    some = rollout([1], [-1], advantages=[0.5]).samples + rollout([1], [-1], advantages=[0]).samples
    assert not has_no_advantage(Rollout(samples=some))


def test_a_rollout_without_rl_credit_never_matches():
    assert not has_no_advantage(rollout([1, 2], [-1, -1]))
    assert not has_no_advantage(rollout([1, 2], [-1, -1], ref_kl_weights=[1, 1]))
    assert not has_no_advantage(Rollout())


def test_zero_advantages_outside_the_rl_loss_are_no_rl_credit():
    distilled = rollout([1, 2], [-1, -1], advantages=[0, 0], rl_weights=[0, 0], ref_kl_weights=[1, 1])
    assert not has_no_advantage(distilled)


def test_an_echo_rollout_with_live_ce_tokens_is_kept():
    echo = rollout([1, 2], [0, -1], mask=[False, True], advantages=[0, 0], ce_weights=[0.5, 0])
    assert not has_no_advantage(echo)


def test_dead_ce_weights_keep_nothing():
    assert has_no_advantage(rollout([1, 2], [-1, -1], advantages=[0, 0], ce_weights=[0, 0]))


def test_filters_do_not_change_the_rollout():
    subject = rollout([1, 900], [-1, -20.0], advantages=[0, 0])
    before = subject.samples[0].logprobs.copy()
    is_gibberish(subject, VOCAB, 500, 2.0)
    is_repetitive(subject, 2, 0.99)
    has_no_advantage(subject)
    np.testing.assert_array_equal(subject.samples[0].logprobs, before)
