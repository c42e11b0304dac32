"""Turns into samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.merge import merge_turns
from headrace.rollout.types import Sample, Turn
from tests.rollout.strategies import FIXED


def turn(prompt: list[int], completion: list[int], version: int = 0, temperature: float = 1.0) -> Turn:
    """The logprob of token t is -t/100, so that a shifted stream shows."""
    return Turn(prompt, completion, [-token / 100 for token in completion], [version] * len(completion), temperature)


def completion_of(sample: Sample) -> list[int]:
    return sample.token_ids[sample.prompt_length :].tolist()


def test_a_turn_that_repeats_the_conversation_extends_its_sample():
    # spec, "Merging turns into samples": the worked example
    (merged,) = merge_turns([turn([1, 2], [3, 4], version=5), turn([1, 2, 3, 4, 5, 6], [7, 8], version=6)])
    assert merged.prompt_length == 2
    assert completion_of(merged) == [3, 4, 5, 6, 7, 8]
    assert merged.mask[2:].tolist() == [True, True, False, False, True, True]
    assert merged.obs_spans == [(2, 1, 4, 2)]
    assert [round(float(value), 2) for value in merged.logprobs] == [0, 0, -0.03, -0.04, 0, 0, -0.07, -0.08]
    assert merged.versions.tolist() == [-1, -1, 5, 5, -1, -1, 6, 6]


def test_interleaved_agents_each_get_their_own_sample():
    merged = merge_turns(
        [
            turn([1], [10]),
            turn([2], [20]),
            turn([1, 10, 11], [12]),
            turn([2, 20, 21], [22]),
            turn([1, 10, 11, 12], [13]),
        ]
    )
    assert [sample.token_ids.tolist() for sample in merged] == [[1, 10, 11, 12, 13], [2, 20, 21, 22]]
    # the third span of agent one is empty: its prompt repeats the sample to the last token
    assert [sample.obs_spans for sample in merged] == [[(1, 2, 2, 1)], [(1, 3, 2, 1)]]
    assert merged[0].mask.tolist() == [False, True, False, True, True]


def test_a_rewritten_history_splits_instead_of_corrupting():
    # the template dropped token 3 (a thinking block) from what was said before
    merged = merge_turns([turn([1, 2], [3, 4]), turn([1, 2, 4, 5], [6])])
    assert [sample.token_ids.tolist() for sample in merged] == [[1, 2, 3, 4], [1, 2, 4, 5, 6]]
    assert [sample.prompt_length for sample in merged] == [2, 4]
    assert [sample.obs_spans for sample in merged] == [[], []]


def test_a_prompt_shorter_than_the_sample_does_not_extend_it():
    merged = merge_turns([turn([1, 2], [3, 4]), turn([1, 2, 3], [9])])
    assert [sample.token_ids.tolist() for sample in merged] == [[1, 2, 3, 4], [1, 2, 3, 9]]


def test_another_temperature_starts_another_sample():
    merged = merge_turns([turn([1], [2], temperature=1.0), turn([1, 2, 3], [4], temperature=0.7)])
    assert [(sample.temperature, sample.token_ids.tolist()) for sample in merged] == [
        (1.0, [1, 2]),
        (0.7, [1, 2, 3, 4]),
    ]


def test_the_longest_matching_sample_is_extended():
    # [1, 2] and [1, 2, 3] are both prefixes of the last prompt
    merged = merge_turns([turn([1], [2]), turn([1, 2, 3], []), turn([1], [2]), turn([1, 2, 3, 4], [5])])
    assert sorted(sample.token_ids.tolist() for sample in merged) == [[1, 2], [1, 2, 3, 4, 5]]


def test_no_turns_give_no_samples():
    assert merge_turns([]) == []


@FIXED
@given(
    st.lists(
        st.tuples(
            st.integers(-1, 2),  # which earlier turn is continued; -1 and absent ones start a new sample
            st.lists(st.integers(0, 3), max_size=3),  # new prompt tokens: few different ones, so prefixes collide
            st.lists(st.integers(0, 3), max_size=3),
            st.sampled_from([1.0, 0.5]),
        ),
        max_size=6,
    )
)
def test_every_turn_can_be_recovered_and_masks_cover_exactly_what_was_sampled(
    plan: list[tuple[int, list[int], list[int], float]],
):
    turns: list[Turn] = []
    for version, (parent, tail, completion, temperature) in enumerate(plan):
        known = turns[parent] if 0 <= parent < len(turns) else turn([], [])
        start = [*known.prompt_ids.tolist(), *known.completion_ids.tolist()]
        turns.append(turn(start + tail, completion, version, temperature))
    merged = merge_turns(turns)

    assert sum(int(sample.mask.sum()) for sample in merged) == sum(len(t.completion_ids) for t in turns)
    for sample in merged:
        assert not sample.mask[: sample.prompt_length].any()
        assert ((sample.versions >= 0) == sample.mask).all()
        assert (sample.logprobs[~sample.mask] == 0).all()
        observed = [i for start, _, _, length in sample.obs_spans for i in range(start, start + length)]
        assert observed == [i for i, on in enumerate(sample.mask[sample.prompt_length :]) if not on]
        for start, index, prompt_start, length in sample.obs_spans:
            here = sample.token_ids[sample.prompt_length + start :][:length].tolist()
            assert here == turns[index].prompt_ids[prompt_start : prompt_start + length].tolist()
    for version, t in enumerate(turns):
        # its own tokens are where its version is, and what stands before them is exactly its prompt
        if not len(t.completion_ids):
            continue
        (home,) = [sample for sample in merged if (sample.versions == version).any()]
        (places,) = (home.versions == version).nonzero()
        first, end = int(places[0]), int(places[-1]) + 1
        assert home.temperature == t.temperature
        assert home.token_ids[:first].tolist() == t.prompt_ids.tolist()
        assert home.token_ids[first:end].tolist() == t.completion_ids.tolist()
        np.testing.assert_allclose(home.logprobs[first:end], t.logprobs, rtol=1e-6)


def test_a_turn_is_compared_with_a_sample_once_however_many_turns_that_has(monkeypatch: pytest.MonkeyPatch):
    turns = [turn(list(range(20)), [1])]
    for n in range(30):
        turns.append(turn([*turns[-1].prompt_ids, *turns[-1].completion_ids, n], [2, 3]))
    compared: list[int] = []
    equal = np.array_equal
    monkeypatch.setattr(np, "array_equal", lambda left, right: compared.append(len(right)) or equal(left, right))
    (merged,) = merge_turns(turns)
    assert merged.token_ids.tolist() == [*turns[-1].prompt_ids, 2, 3]
    assert len(compared) == 2 * 30  # what was given, and what was sampled


def test_a_sample_that_was_extended_is_distinguished_by_its_beginning():
    merged = merge_turns([turn([1, 2], [3]), turn([1, 2, 3, 4], [5]), turn([9, 2, 3, 4, 5], [6]), turn([1, 2, 3], [7])])
    assert [sample.token_ids.tolist() for sample in merged] == [[1, 2, 3, 4, 5], [9, 2, 3, 4, 5, 6], [1, 2, 3, 7]]
