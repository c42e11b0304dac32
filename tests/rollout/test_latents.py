"""Latents: a stream with a row of numbers per token, from a turn to packed bins and back from files."""

from pathlib import Path

import numpy as np
import pytest

from headrace.rollout.batch import Batch, BatchSample, encode_batch, read_batch
from headrace.rollout.merge import merge_turns
from headrace.rollout.packing import pack
from headrace.rollout.types import LATENTS, Sample, Turn
from tests.rollout.strategies import assert_same, sample

ROWS = np.arange(6, dtype=np.float16).reshape(2, 3) / 7


def latent_turn(prompt: list[int], completion: list[int]) -> Turn:
    return Turn(prompt, completion, [-0.5] * len(completion), [1] * len(completion), 1.0, latents=ROWS)


def latent_sample() -> Sample:
    (merged,) = merge_turns([latent_turn([1, 2, 3], [4, 5])])
    return merged


def test_a_sample_has_the_latents_of_its_completion_and_zeros_before():
    latents = latent_sample().streams[LATENTS]
    assert latents.dtype == np.float16
    np.testing.assert_array_equal(latents, np.concatenate([np.zeros((3, 3)), ROWS]))


def test_a_turn_after_latents_starts_a_sample_since_its_prompt_was_read_as_plain_tokens():
    turns = [latent_turn([1], [2, 3]), latent_turn([1, 2, 3, 4], [5, 6])]
    assert [each.token_ids.tolist() for each in merge_turns(turns)] == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("latents", [ROWS[:1], ROWS[0]])
def test_latents_that_are_not_one_row_per_token_are_refused(latents: np.ndarray):
    with pytest.raises(ValueError, match="latents"):
        Turn([1], [2, 3], [-0.5] * 2, [1] * 2, 1.0, latents=latents)


def test_a_stream_that_losses_read_must_have_one_number_per_token():
    with pytest.raises(ValueError, match="advantages"):
        sample(1, 1).set_stream("advantages", np.ones((2, 3)))


def test_a_truncated_sample_keeps_the_first_rows():
    np.testing.assert_array_equal(latent_sample().truncated(4).streams[LATENTS][3], ROWS[0])


def test_latents_come_back_from_a_batch_file_and_only_for_their_sample(tmp_path: Path):
    batch = Batch(1, 0, [BatchSample(each, "env", n) for n, each in enumerate([sample(2, 1), latent_sample()])])
    (tmp_path / "batch").write_bytes(encode_batch(batch))
    back = [entry.sample for entry in read_batch(tmp_path / "batch").samples]
    assert LATENTS not in back[0].streams
    assert_same(back[1], latent_sample())
    assert back[1].streams[LATENTS].dtype == np.float16


def test_a_bin_has_zeros_for_samples_without_latents_and_none_if_no_sample_has_any():
    plain, latent = sample(2, 1, advantages=[0, 0, 1]), latent_sample()
    latent.set_stream("advantages", [0, 0, 0, 1, 1])
    (mixed,) = pack([plain, latent], 16)
    assert mixed.latents is not None and mixed.latents.dtype == np.float16
    np.testing.assert_array_equal(mixed.latents, np.concatenate([latent.streams[LATENTS], np.zeros((3, 3))]))
    assert pack([plain], 16)[0].latents is None


def test_latents_of_two_sizes_cannot_be_packed_together():
    parts = [latent_sample(), latent_sample()]
    parts[1].set_stream(LATENTS, np.ones((5, 4)))
    for part in parts:
        part.set_stream("advantages", [1.0] * 5)
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        pack(parts, 16)
