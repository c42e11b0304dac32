"""Samples into bins."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.packing import STREAM_DEFAULTS, Bin, pack
from headrace.rollout.types import Sample
from tests.rollout.strategies import FIXED, sample, samples


def credited(prompt: int, completion: int, advantage: float = 1.0) -> Sample:
    return sample(prompt, completion, advantages=[advantage] * (prompt + completion))


def sequences(bin_: Bin) -> list[slice]:
    ends = np.cumsum(bin_.lengths).tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


@FIXED
@given(st.lists(samples(min_length=1, max_length=12, with_advantages=True), max_size=9), st.integers(1, 16))
def test_every_sample_is_in_exactly_one_bin_with_all_its_streams(given_samples: list[Sample], seq_len: int):
    bins = pack(given_samples, seq_len)
    assert sorted(index for bin_ in bins for index in bin_.sources) == list(range(len(given_samples)))
    for bin_ in bins:
        assert 0 < len(bin_.token_ids) <= seq_len
        assert sum(bin_.lengths) == len(bin_.token_ids)
        for values in (bin_.mask, bin_.logprobs, bin_.versions, bin_.temperatures, *bin_.streams.values()):
            assert values.shape == bin_.token_ids.shape
        assert bin_.position_ids.tolist() == [i for length in bin_.lengths for i in range(length)]
        for index, place in zip(bin_.sources, sequences(bin_), strict=True):
            original = given_samples[index].truncated(seq_len)
            np.testing.assert_array_equal(bin_.token_ids[place], original.token_ids)
            np.testing.assert_array_equal(bin_.mask[place], original.mask)
            np.testing.assert_array_equal(bin_.logprobs[place], original.logprobs)
            np.testing.assert_array_equal(bin_.versions[place], original.versions)
            assert set(bin_.temperatures[place].tolist()) == {float(np.float32(original.temperature))}
            for name, default in STREAM_DEFAULTS.items():
                if name in bin_.streams:
                    expected = original.streams.get(name, np.full(len(original), default, np.float32))
                    np.testing.assert_array_equal(bin_.streams[name][place], expected)
                else:
                    assert name not in original.streams


def test_the_longest_go_first_into_the_first_bin_with_room():
    # first-fit-decreasing of 3, 5, 2, 6, 4 into 8: [6, 2], [5, 3], [4]
    bins = pack([credited(1, n - 1) for n in (3, 5, 2, 6, 4)], 8)
    assert [bin_.lengths for bin_ in bins] == [[6, 2], [5, 3], [4]]
    assert [bin_.sources for bin_ in bins] == [[3, 2], [1, 0], [4]]


def test_equal_lengths_keep_their_order_so_that_packing_is_reproducible():
    assert [bin_.sources for bin_ in pack([credited(1, 1) for _ in range(5)], 4)] == [[0, 1], [2, 3], [4]]


def test_absent_streams_get_their_defaults_where_another_sample_has_them():
    # spec, "Packing": rl 1, ce 0, ref_kl 0, ref_logprobs 0
    bare = credited(1, 1)
    full = sample(
        1, 1, advantages=[5, 5], rl_weights=[2, 2], ce_weights=[3, 3], ref_kl_weights=[4, 4], ref_logprobs=[-6, -6]
    )
    (bin_,) = pack([bare, full], 8)
    assert {name: values.tolist() for name, values in bin_.streams.items()} == {
        "advantages": [1, 1, 5, 5],
        "rl_weights": [1, 1, 2, 2],
        "ce_weights": [0, 0, 3, 3],
        "ref_kl_weights": [0, 0, 4, 4],
        "ref_logprobs": [0, 0, -6, -6],
    }


def test_a_distilled_sample_packs_with_a_credited_one_and_has_no_advantage():
    distilled = sample(1, 1, rl_weights=[0, 0], ref_kl_weights=[0, 1])
    (bin_,) = pack([credited(1, 1), distilled], 4)
    assert bin_.streams["advantages"].tolist() == [1, 1, 0, 0]
    assert bin_.streams["rl_weights"].tolist() == [1, 1, 0, 0]


def test_streams_that_the_trainer_does_not_know_stay_out_of_bins():
    (bin_,) = pack([sample(1, 1, advantages=[0, 1], teacher_entropy=[1, 1])], 4)
    assert set(bin_.streams) == {"advantages"}


@pytest.mark.parametrize("streams", [{}, {"rl_weights": [0.0, 1.0, 0.0]}, {"ce_weights": [0.0, 1.0, 1.0]}])
def test_tokens_in_the_rl_loss_without_advantages_are_refused(streams: dict[str, list[float]]):
    with pytest.raises(ValueError, match=r"sample 1 has \d tokens in the rl loss but no advantages"):
        pack([credited(1, 1), sample(1, 2, **streams)], 8)


def test_a_sample_without_rl_tokens_needs_no_advantages():
    context_only = sample(3, 0)
    supervised = sample(1, 1, rl_weights=[0, 0], ce_weights=[0, 1])
    assert sum(len(bin_.lengths) for bin_ in pack([context_only, supervised], 8)) == 2


def test_a_sample_that_is_too_long_is_cut_in_every_stream():
    (bin_,) = pack([sample(2, 4, advantages=[0, 0, 1, 2, 3, 4])], 4)
    assert bin_.token_ids.tolist() == [0, 1, 2, 3]
    assert bin_.streams["advantages"].tolist() == [0, 0, 1, 2]
    assert bin_.mask.tolist() == [False, False, True, True]


def test_a_sample_without_tokens_is_refused():
    with pytest.raises(ValueError, match="sample 0 has no tokens"):
        pack([sample(0, 0)], 8)


def test_nothing_packs_into_nothing():
    assert pack([], 8) == []
