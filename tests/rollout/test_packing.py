"""Samples into bins, and bins over workers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.packing import (
    NO_SAMPLE,
    STREAM_DEFAULTS,
    Bin,
    Cost,
    assign_bins,
    cost_of_model,
    cut_into_bins,
    pack,
    pack_for_worker,
)
from headrace.rollout.types import NOT_SAMPLED, Sample
from tests.rollout.strategies import FIXED, sample, samples

PER_TOKEN = Cost(1, 0)
SQUARED = Cost(1, 1)
QWEN3_0_6B = Cost(1191968768, 114688)

sample_lists = st.lists(samples(min_length=1, max_length=12, trainable=True), max_size=9)


def pack_for_workers(
    samples: list[Sample], seq_len: int, workers: int, cost: Cost, multiple: int = 1
) -> list[list[Bin]]:
    return [pack_for_worker(worker, samples, seq_len, workers, cost, multiple) for worker in range(workers)]


def credited(prompt: int, completion: int, advantage: float = 1.0) -> Sample:
    return sample(prompt, completion, advantages=[advantage] * (prompt + completion))


def of_lengths(*lengths: int) -> list[Sample]:
    return [credited(1, length - 1) for length in lengths]


def sequences(bin_: Bin) -> list[slice]:
    ends = np.cumsum(bin_.lengths).tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def assert_streams_aligned(bin_: Bin) -> None:
    assert sum(bin_.lengths) == len(bin_.token_ids)
    assert len(bin_.lengths) == len(bin_.sources)
    for values in (bin_.mask, bin_.logprobs, bin_.versions, bin_.temperatures, *bin_.streams.values()):
        assert values.shape == bin_.token_ids.shape
    assert bin_.position_ids.tolist() == [i for length in bin_.lengths for i in range(length)]


def assert_holds(bin_: Bin, place: slice, original: Sample) -> None:
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


def assert_nothing_to_learn(bin_: Bin, place: slice) -> None:
    assert "rl_weights" in bin_.streams
    assert not bin_.mask[place].any()
    assert not any(values[place].any() for name, values in bin_.streams.items() if name != "kl_logprobs")
    assert set(bin_.versions[place].tolist()) == {NOT_SAMPLED}
    assert bin_.temperatures[place].all()


def assert_sound(bin_: Bin, originals: list[Sample], seq_len: int) -> None:
    """Everything that holds for a bin by itself."""
    assert_streams_aligned(bin_)
    assert NO_SAMPLE not in bin_.sources[:-1]
    for index, place in zip(bin_.sources, sequences(bin_), strict=True):
        if index == NO_SAMPLE:
            assert_nothing_to_learn(bin_, place)
        else:
            assert_holds(bin_, place, originals[index].truncated(seq_len))
    assert sum(n for n, index in zip(bin_.lengths, bin_.sources, strict=True) if index != NO_SAMPLE) <= seq_len


def packed_samples(bins: list[Bin]) -> list[int]:
    return sorted(index for bin_ in bins for index in bin_.sources if index != NO_SAMPLE)


@FIXED
@given(sample_lists, st.integers(1, 16))
def test_every_sample_is_in_exactly_one_bin_with_all_its_streams(given_samples: list[Sample], seq_len: int):
    bins = pack(given_samples, seq_len)
    assert packed_samples(bins) == list(range(len(given_samples)))
    for bin_ in bins:
        assert_sound(bin_, given_samples, seq_len)
        assert NO_SAMPLE not in bin_.sources


@FIXED
@given(sample_lists, st.integers(1, 16), st.integers(1, 5), st.integers(1, 8), st.integers(0, 3))
def test_workers_get_as_many_bins_each_and_every_sample_once(
    given_samples: list[Sample], seq_len: int, workers: int, multiple: int, b: int
):
    shares = pack_for_workers(given_samples, seq_len, workers, Cost(1, b), multiple)
    bins = [bin_ for share in shares for bin_ in share]
    assert len(shares) == workers
    assert len({len(share) for share in shares}) == 1
    assert packed_samples(bins) == list(range(len(given_samples)))
    for bin_ in bins:
        assert_sound(bin_, given_samples, seq_len)
        assert len(bin_.token_ids) % multiple == 0
        padding = [n for n, index in zip(bin_.lengths, bin_.sources, strict=True) if index == NO_SAMPLE]
        assert padding == [multiple] or sum(padding) < multiple


@FIXED
@given(sample_lists, st.integers(1, 16), st.integers(1, 5), st.integers(1, 8))
def test_dummies_appear_only_where_no_bin_can_be_split(
    given_samples: list[Sample], seq_len: int, workers: int, multiple: int
):
    bins = [bin_ for share in pack_for_workers(given_samples, seq_len, workers, SQUARED, multiple) for bin_ in share]
    dummies = [bin_ for bin_ in bins if bin_.sources == [NO_SAMPLE]]
    assert len(dummies) < workers
    if dummies:
        assert all(len([index for index in bin_.sources if index != NO_SAMPLE]) < 2 for bin_ in bins)


@FIXED
@given(sample_lists, st.integers(1, 16), st.integers(1, 5), st.integers(1, 8))
def test_every_worker_runs_its_costliest_bin_first(
    given_samples: list[Sample], seq_len: int, workers: int, multiple: int
):
    for share in pack_for_workers(given_samples, seq_len, workers, SQUARED, multiple):
        costs = [SQUARED.of(bin_.lengths) for bin_ in share]
        assert costs == sorted(costs, reverse=True)


@FIXED
@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 40))
def test_each_sample_goes_where_a_plain_search_for_the_first_fit_puts_it(lengths: list[int], seq_len: int):
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [bin_ for bin_ in bins if sum(lengths[i] for i in bin_) + lengths[index] <= seq_len]
        fitting[0].append(index) if fitting else bins.append([index])
    assert cut_into_bins(lengths, seq_len, 1, PER_TOKEN) == bins


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
    distilled = sample(1, 1, rl_weights=[0, 0], ref_kl_weights=[0, 1], ref_logprobs=[0, -1])
    (bin_,) = pack([credited(1, 1), distilled], 4)
    assert bin_.streams["advantages"].tolist() == [1, 1, 0, 0]
    assert bin_.streams["rl_weights"].tolist() == [1, 1, 0, 0]


def test_streams_that_the_trainer_does_not_know_stay_out_of_bins():
    (bin_,) = pack([sample(1, 1, advantages=[0, 1], teacher_entropy=[1, 1])], 4)
    assert set(bin_.streams) == {"advantages"}


@pytest.mark.parametrize("streams", [{}, {"rl_weights": [0.0, 1.0, 0.0]}, {"ce_weights": [0.0, 1.0, 1.0]}])
def test_tokens_in_the_rl_loss_without_advantages_are_refused(streams: dict[str, list[float]]):
    with pytest.raises(ValueError, match=r"sample 1\b.*advantages"):
        pack([credited(1, 1), sample(1, 2, **streams)], 8)


def test_tokens_in_the_ref_kl_loss_without_a_reference_are_refused_beside_others_that_have_one():
    scored = sample(1, 1, rl_weights=[0, 0], ref_kl_weights=[0, 1], ref_logprobs=[0, -1])
    with pytest.raises(ValueError, match=r"sample 1\b.*ref_logprobs.*opd, opsd"):
        pack([scored, sample(1, 1, rl_weights=[0, 0], ref_kl_weights=[0, 1])], 8)


def test_a_stream_of_another_length_is_refused_also_where_the_sample_is_cut():
    short = sample(2, 4, advantages=[0, 0, 1, 2, 3, 4])
    short.streams["advantages"] = short.streams["advantages"][:4]
    with pytest.raises(ValueError, match="advantages"):
        pack([short], 3)


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
    with pytest.raises(ValueError, match="sample 0"):
        pack([sample(0, 0)], 8)


def test_nothing_packs_into_nothing():
    assert pack([], 8) == []


def test_the_costliest_bin_is_split_until_the_bins_divide_by_the_workers():
    # first-fit-decreasing into 8: [6, 2], [5, 3], [4, 4]; squares 40, 34, 32: the first is split for two workers
    assert cut_into_bins([6, 2, 5, 3, 4, 4], 8, 2, Cost(1, 1)) == [[0], [2, 3], [4, 5], [1]]


def test_a_bin_of_one_sample_is_passed_over_for_a_cheaper_one_that_can_be_split():
    # [8], [4, 2, 1, 1]: 64 + 8 against 22 + 8; the halves 4 and 2 + 1 + 1 are as equal as can be
    assert cut_into_bins([8, 4, 2, 1, 1], 8, 3, Cost(1, 1)) == [[0], [1], [2, 3, 4]]


def test_halves_are_split_again_when_workers_are_many():
    assert cut_into_bins([1, 1, 1, 1], 4, 4, PER_TOKEN) == [[0], [1], [2], [3]]


def test_fewer_samples_than_workers_leave_dummies_without_loss():
    shares = pack_for_workers(of_lengths(3, 2), 8, 4, PER_TOKEN, 4)
    assert [[bin_.sources for bin_ in share] for share in shares] == [[[0, -1]], [[1, -1]], [[-1]], [[-1]]]
    (dummy,) = shares[3]
    assert dummy.lengths == [4]
    assert dummy.mask.tolist() == [False] * 4
    assert {name: values.tolist() for name, values in dummy.streams.items()} == {"rl_weights": [0, 0, 0, 0]}


def test_padding_is_one_more_sequence_with_weight_0_in_all_streams():
    full = sample(
        1, 2, advantages=[5] * 3, rl_weights=[2] * 3, ce_weights=[3] * 3, ref_kl_weights=[4] * 3, ref_logprobs=[-6] * 3
    )
    ((bin_,),) = pack_for_workers([full, credited(1, 1)], 8, 1, PER_TOKEN, 4)
    assert bin_.lengths == [3, 2, 3]
    assert bin_.sources == [0, 1, NO_SAMPLE]
    assert bin_.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert bin_.mask.tolist() == [False, True, True, False, True, False, False, False]
    assert {name: values.tolist() for name, values in bin_.streams.items()} == {
        "advantages": [5, 5, 5, 1, 1, 0, 0, 0],
        "rl_weights": [2, 2, 2, 1, 1, 0, 0, 0],
        "ce_weights": [3, 3, 3, 0, 0, 0, 0, 0],
        "ref_kl_weights": [4, 4, 4, 0, 0, 0, 0, 0],
        "ref_logprobs": [-6, -6, -6, 0, 0, 0, 0, 0],
    }


def test_a_bin_that_needs_no_padding_has_no_stream_for_it():
    ((bin_,),) = pack_for_workers(of_lengths(4), 8, 1, PER_TOKEN, 4)
    assert set(bin_.streams) == {"advantages"}


def test_long_samples_meet_short_ones_so_that_attention_is_shared():
    # Four full bins of 8 tokens: one sample of 8 (64 pairs), two of 4 (32), four of 2 (16), eight of 1 (8)
    lengths = [8, 4, 4, 2, 2, 2, 2] + [1] * 8
    shares = assign_bins(lengths, 8, 2, Cost(1, 1))
    assert [[[lengths[i] for i in bin_] for bin_ in share] for share in shares] == [
        [[8], [1] * 8],
        [[4, 4], [2] * 4],
    ]


@pytest.mark.parametrize("median", [500, 2000, 6000])
def test_512_bins_of_real_lengths_over_32_workers_are_within_one_percent_of_the_mean(median: int):
    drawn = np.random.default_rng(0).lognormal(np.log(median), 1, 16384).clip(16, 16384).astype(int)
    lengths = drawn[np.cumsum(drawn) < 0.96 * 512 * 16384].tolist()
    shares = assign_bins(lengths, 16384, 32, QWEN3_0_6B)
    assert {len(share) for share in shares} == {16}
    loads = [sum(QWEN3_0_6B.of(lengths[i] for i in bin_) for bin_ in share) for share in shares]
    assert max(loads) <= 1.01 * sum(loads) / 32


def test_no_samples_leave_every_worker_with_nothing():
    assert pack_for_workers([], 8, 3, PER_TOKEN) == [[], [], []]


def test_numbers_that_make_no_bins_are_refused():
    with pytest.raises(ValueError, match="workers = 0"):
        pack_for_worker(0, of_lengths(2), 8, 0, PER_TOKEN)
    with pytest.raises(ValueError, match="pad_to_multiple_of = 0"):
        pack_for_worker(0, of_lengths(2), 8, 1, PER_TOKEN, 0)
    with pytest.raises(ValueError, match=r"\b9\b.*\b8\b"):
        assign_bins([2, 9], 8, 1, PER_TOKEN)


def test_the_cost_of_qwen3_comes_from_its_config():
    # a = 28 * (2*1024*2048 + 4*1024*1024 + 2*2048*1024 + 6*1024*3072) + 2*1024*151936, b = 2 * 28 * 2048
    assert (
        cost_of_model(
            hidden_size=1024,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=3072,
            vocab_size=151936,
        )
        == QWEN3_0_6B
    )


def test_cost_grows_with_tokens_and_with_the_square_of_each_sequence():
    assert Cost(10, 1).of([3, 4]) == 10 * 7 + 9 + 16


def test_tokens_that_cost_nothing_are_refused():
    with pytest.raises(ValueError, match="cost"):
        Cost(0, 1)
