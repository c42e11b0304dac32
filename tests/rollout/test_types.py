"""The words of the system: alignment, truncation, stable task keys."""

import json
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rollout.types import NOT_SAMPLED, Rollout, RolloutError, Sample, Task, Turn
from tests.rollout.strategies import FIXED, sample, samples


def test_the_words_of_an_error_can_always_be_written():
    error = RolloutError(404, "half \ud800")
    assert (error.reason, error.detail) == ("404", r"half \ud800")
    assert msgspec.json.decode(msgspec.json.encode(error), type=RolloutError) == error


@pytest.mark.parametrize("short", ["mask", "logprobs", "versions"])
def test_a_sample_refuses_an_array_of_another_length(short: str):
    arrays = {"mask": [False, True, True], "logprobs": [0.0, -1.0, -1.0], "versions": [-1, 0, 0]}
    arrays[short] = arrays[short][:-1]
    with pytest.raises(ValueError, match=short):
        Sample([1, 2, 3], **arrays, prompt_length=1)


def test_a_sample_refuses_a_stream_of_another_length_and_keeps_the_name_in_the_message():
    with pytest.raises(ValueError, match=r"'advantages'.*\(2,\).*\b3\b"):
        sample(1, 2).set_stream("advantages", [1.0, 1.0])


def test_a_refused_stream_is_not_attached():
    target = sample(1, 2)
    with pytest.raises(ValueError, match="advantages"):
        target.set_stream("advantages", [1.0])
    assert target.streams == {}


def test_a_sample_refuses_one_number_for_all_tokens():
    with pytest.raises(ValueError, match="advantages"):
        sample(1, 2).set_stream("advantages", np.float32(1.0))


@pytest.mark.parametrize("prompt_length", [-1, 4])
def test_a_prompt_cannot_reach_outside_its_sample(prompt_length: int):
    with pytest.raises(ValueError, match=f"prompt_length = {prompt_length}"):
        Sample([1, 2, 3], [False] * 3, [0.0] * 3, [-1] * 3, prompt_length)


@pytest.mark.parametrize(("logprobs", "versions"), [([-1.0], [0, 0]), ([-1.0, -1.0], [0])])
def test_a_turn_refuses_answers_without_a_logprob_and_a_version_each(logprobs: list[float], versions: list[int]):
    with pytest.raises(ValueError, match="logprobs"):
        Turn([1], [2, 3], logprobs, versions, 1.0)


def test_a_turn_refuses_truncated_logprobs_of_another_length():
    with pytest.raises(ValueError, match=r"\b2\b.*\b1\b.*truncated_logprobs"):
        Turn([1], [2, 3], [-1.0, -1.0], [0, 0], 1.0, truncated_logprobs=[-0.5])


def test_truncation_cuts_every_stream_at_the_same_token():
    whole = sample(2, 3, advantages=[0, 0, 1, 2, 3], teacher_entropy=[9, 8, 7, 6, 5])
    cut = whole.truncated(4)
    assert cut.token_ids.tolist() == [0, 1, 2, 3]
    assert cut.mask.tolist() == [False, False, True, True]
    assert cut.logprobs.tolist() == [0, 0, -0.5, -0.5]
    assert cut.versions.tolist() == [-1, -1, 3, 3]
    assert cut.streams["advantages"].tolist() == [0, 0, 1, 2]
    assert cut.streams["teacher_entropy"].tolist() == [9, 8, 7, 6]
    assert (cut.prompt_length, cut.completion_length) == (2, 2)
    assert len(whole) == 5


def test_truncation_cuts_observation_spans_where_the_tokens_end():
    # prompt of 2, then completion: two sampled, observation of 3 at 2, one sampled, observation of 2 at 6
    whole = sample(2, 8)
    whole.obs_spans = [(2, 1, 4, 3), (6, 2, 8, 2)]
    assert whole.truncated(9).obs_spans == [(2, 1, 4, 3), (6, 2, 8, 1)]
    assert whole.truncated(8).obs_spans == [(2, 1, 4, 3)]
    assert whole.truncated(6).obs_spans == [(2, 1, 4, 2)]
    assert whole.truncated(4).obs_spans == []
    assert whole.truncated(1).obs_spans == []


def test_a_cut_inside_the_prompt_leaves_a_prompt():
    cut = sample(4, 2).truncated(3)
    assert (cut.prompt_length, cut.completion_length, cut.mask.any()) == (3, 0, False)


@FIXED
@given(samples(), st.integers(0, 15))
def test_truncation_is_a_prefix_and_stays_aligned(whole: Sample, length: int):
    cut = whole.truncated(length)
    cut.check()
    assert len(cut) == min(length, len(whole))
    assert cut.streams.keys() == whole.streams.keys()
    for name, values in cut.streams.items():
        np.testing.assert_array_equal(values, whole.streams[name][:length])


def test_a_task_key_is_the_same_in_another_process_with_another_hash_seed():
    data = {"b": [1, 2.5, None], "a": "é", "c": {"x": 1}}
    code = f"from headrace.rollout.types import Task; print(Task('math', {data!r}).key)"
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {Task("math", data).key}


def test_a_task_key_ignores_the_order_of_keys_at_every_depth():
    one = Task("math", {"a": 1, "b": {"c": 2, "d": 3}})
    other = Task("math", {"b": {"d": 3, "c": 2}, "a": 1})
    assert one.key == other.key


def test_the_same_data_in_another_environment_is_another_task():
    assert Task("math", {"q": 1}).key != Task("code", {"q": 1}).key


def test_other_data_is_another_task():
    assert Task("math", {"q": 1}).key != Task("math", {"q": 2}).key


def test_an_environments_own_key_is_kept():
    assert Task("math", {"q": 1}, "gsm8k-17").key == "gsm8k-17"


def test_a_task_survives_json_with_its_key():
    task = Task("math", {"q": [1, {"x": "y"}]})
    assert msgspec.json.decode(msgspec.json.encode(task), type=Task) == task
    assert json.loads(msgspec.json.encode(task))["key"] == task.key


def test_a_rollout_is_as_old_as_its_oldest_token():
    turns = [Turn([1], [2, 3], [-1.0, -1.0], [7, 8], 1.0), Turn([1], [2], [-1.0], [6], 1.0), Turn([1], [], [], [], 1.0)]
    assert Rollout(turns=turns).oldest_version == 6
    assert Rollout(turns=turns).completion_tokens == 3
    assert Rollout(turns=turns[2:]).oldest_version is None
    assert Rollout().oldest_version is None


def test_tokens_that_no_version_sampled_do_not_hide_the_age_of_those_that_one_did():
    by_hand = Turn([1], [2, 3], [-1.0, -1.0], [NOT_SAMPLED, NOT_SAMPLED], 1.0)
    half = Turn([1], [2, 3, 4], [-1.0, -1.0, -1.0], [NOT_SAMPLED, 7, 8], 1.0)
    for turns in ([by_hand, half], [half, by_hand]):
        assert (Rollout(turns=turns).oldest_version, Rollout(turns=turns).newest_version) == (7, 8)
    assert (Rollout(turns=[by_hand]).oldest_version, Rollout(turns=[by_hand]).newest_version) == (None, None)
