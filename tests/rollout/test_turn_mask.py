"""An environment says which sampled tokens train, from its turns to the trainer and the files of a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.algorithms.base import RolloutView
from headrace.algorithms.group_credit import GroupCredit
from headrace.algorithms.grpo import Grpo
from headrace.environments.channel import encode, make_decoder
from headrace.orchestrator.filters import is_gibberish, is_repetitive
from headrace.rollout.checks import check_rollout
from headrace.rollout.credit import Cohort
from headrace.rollout.merge import merge_turns
from headrace.rollout.packing import pack
from headrace.rollout.routing import gradient_shares, route_actions
from headrace.rollout.types import Rollout, Sample, Task, Turn
from headrace.trainer.probe import sampled_indices
from headrace.trainer.tokens import StepTokens
from headrace.transport.rollout_files import RolloutFiles, write_rollouts

MASKS: list[list[bool] | None] = [[False, False, True], None]


def turns_of(masks: Any = MASKS, logprob: float = -1.0) -> list[Turn]:
    """Two turns in one sample: 2 tokens of prompt, 3 sampled, 1 observed, 2 sampled."""
    first = Turn([1, 2], [3, 4, 5], [logprob] * 3, [7] * 3, 1.0, mask=masks[0])
    return [first, Turn([1, 2, 3, 4, 5, 6], [8, 9], [logprob] * 2, [7] * 2, 1.0, mask=masks[1])]


def rollout_of(masks: Any = MASKS, reward: float = 1.0, **more: Any) -> Rollout:
    turns = turns_of(masks, **more)
    return Rollout(env="env", reward=reward, turns=turns, samples=merge_turns(turns), stop_reason="stop")


def sample_of(masks: Any = MASKS) -> Sample:
    [sample] = rollout_of(masks).samples
    return sample


def test_a_sample_trains_what_the_masks_of_its_turns_select_and_keeps_what_was_sampled():
    sample, plain = sample_of(), sample_of([None, None])
    assert np.flatnonzero(sample.mask).tolist() == [4, 6, 7]
    assert np.flatnonzero(sample.sampled).tolist() == np.flatnonzero(plain.mask).tolist() == [2, 3, 4, 6, 7]
    for name in ("token_ids", "logprobs", "versions"):
        assert getattr(sample, name).tolist() == getattr(plain, name).tolist()
    assert sample.obs_spans == plain.obs_spans
    assert sample.truncated(5).mask.tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("mask", [[True], [True] * 4, [[True]] * 3, [0.5, 1, 1], ["yes", "", ""]])
def test_a_mask_of_another_length_or_kind_is_refused_and_fails_the_rollout(mask: Any):
    with pytest.raises(ValueError, match="mask"):
        turns_of([mask, None])
    rollout = rollout_of()
    rollout.rewards = {"right": 1.0}
    rollout.turns[0].mask = mask  # an environment sets it later
    check_rollout(rollout, scored_later=False, vocab_size=100)
    assert rollout.error is not None and rollout.error.reason == "invalid_rollout" and "mask" in rollout.error.detail


def test_zeros_and_ones_are_a_mask():
    assert sample_of([[0, 0, 1], np.array([1, 1])]).mask.tolist() == sample_of().mask.tolist()


def test_masks_pass_between_an_environment_s_process_and_the_orchestrator():
    sent = rollout_of()
    received = make_decoder(Rollout).decode(encode(sent))
    assert received.turns[0].mask.tolist() == MASKS[0] and received.turns[1].mask is None
    assert merge_turns(received.turns)[0].mask.tolist() == sent.samples[0].mask.tolist()


def test_saved_rollouts_have_the_masks_of_their_turns(tmp_path: Path):
    write_rollouts(tmp_path, 1, [rollout_of(), rollout_of([None, None])], [])
    masked, plain = [saved.rollout for saved in RolloutFiles(tmp_path).read(1)]
    assert [None if turn.mask is None else turn.mask.tolist() for turn in masked.turns] == MASKS
    assert [turn.mask for turn in plain.turns] == [None, None]
    assert merge_turns(masked.turns)[0].mask.tolist() == masked.samples[0].mask.tolist()
    assert (masked.completion_tokens, masked.trained_tokens) == (5, 3)


@pytest.mark.parametrize("component", ["rl", "ce", "ref_kl"])
def test_excluded_tokens_are_in_no_loss_whatever_an_algorithm_wrote(component: Any):
    rollout = rollout_of()
    [sample] = rollout.samples
    everywhere = np.where(np.arange(len(sample)) >= 2, 0.5, 0.0)
    for name in ("advantages", "ref_logprobs", "ce_weights", "ref_kl_weights"):
        sample.set_stream(name, everywhere)
    route_actions(sample, component)
    [tokens] = [StepTokens(pack([sample], 100))]
    trained = {name: np.flatnonzero(members).tolist() for name, members in tokens.members.items() if members.any()}
    assert trained.pop("rl", [4, 6, 7]) == [4, 6, 7]
    assert trained == {"ce": [4, 5, 6, 7], "ref_kl": [4, 5, 6, 7]}  # with the observation, which it selected
    assert tokens.count("rl") == (3 if component == "rl" else 0)
    assert {share.members for name, share in gradient_shares(rollout).items() if name != "rl"} == {4}


def test_without_weights_the_trained_tokens_alone_are_routed():
    sample = sample_of()
    route_actions(sample, "ce")
    assert np.flatnonzero(sample.streams["ce_weights"]).tolist() == [4, 6, 7]


async def test_credit_counts_trained_tokens_and_costs_count_sampled_ones():
    group = [rollout_of(reward=1.0), rollout_of([None, None], reward=0.0)]
    cohort = Cohort.of(group)
    assert cohort.trained_tokens.tolist() == [3, 5]
    assert cohort.output_tokens.tolist() == [5, 5]
    assert cohort.context_tokens.tolist() == [3, 3]
    views = [RolloutView(rollout, Task("env", {})) for rollout in group]
    await Grpo(GroupCredit(length_weighted=True)).score_group(views)
    assert [rollout.mean_advantage for rollout in group] == pytest.approx([1 - 3 / 8, -3 / 8])
    assert sum(share.total * sign for r, sign in zip(group, (1, -1), strict=True) for share in shares(r)) == 0


def shares(rollout: Rollout) -> list[Any]:
    return list(gradient_shares(rollout).values())


def test_filters_look_at_what_trains():
    certain = rollout_of([[False] * 3, None], logprob=0.0)
    assert is_repetitive(rollout_of([None, None], logprob=0.0), window=4, prob_threshold=0.99)
    assert not is_repetitive(certain, window=4, prob_threshold=0.99)
    odd = {"vocab_size": 10, "token_id_threshold": 4, "logprob_offset": 0.0}
    assert is_gibberish(rollout_of([None, [False] * 2], logprob=-20.0), **odd)
    assert not is_gibberish(rollout_of([[True, True, False], [False] * 2], logprob=-20.0), **odd)


def test_drift_probes_score_all_sampled_tokens():
    assert sampled_indices(sample_of()).tolist() == [2, 3, 4, 6, 7]


def test_a_rollout_that_trains_nothing_is_no_trouble():
    nothing = sample_of([[False] * 3, [False] * 2])
    nothing.set_stream("advantages", np.ones(len(nothing)))
    tokens = StepTokens(pack([nothing], 100))
    assert tokens.count("rl") == 0 and not tokens.scored.any()
    assert rollout_of([[False] * 3, [False] * 2]).mean_advantage is None
