"""Routes: the experts of each token, from turns to packed bins and back from files."""

from pathlib import Path

import numpy as np
import pytest

from headrace.rollout.batch import Batch, BatchSample, encode_batch, read_batch
from headrace.rollout.merge import merge_turns
from headrace.rollout.packing import pack
from headrace.rollout.types import ROUTES, Sample, Turn
from tests.rollout.strategies import assert_same, sample

FREE = 255


def turn(prompt: list[int], completion: list[int], first: int | None) -> Turn:
    """A turn whose tokens have the routes (first, first), (first + 1, first + 1), ...; None: no routes."""
    count = len(prompt) + len(completion) - 1
    routes = None if first is None else np.arange(first, first + count, dtype=np.uint8)[:, None].repeat(2, 1)
    return Turn(prompt, completion, [-0.5] * len(completion), [1] * len(completion), 1.0, routes=routes)


def merged(*turns: Turn) -> Sample:
    (whole,) = merge_turns(turns)
    return whole


def column(whole: Sample) -> list[int]:
    """The first expert of each token."""
    assert whole.streams[ROUTES].dtype == np.uint8
    return whole.streams[ROUTES][:, 0].tolist()


def test_the_last_token_of_a_sample_has_no_route():
    assert column(merged(turn([1, 2], [3, 4], 10))) == [10, 11, 12, FREE]


def test_a_token_keeps_the_route_that_it_was_sampled_with_and_the_last_of_a_turn_gets_that_of_the_next():
    assert column(merged(turn([1, 2], [3, 4], 10), turn([1, 2, 3, 4, 5], [6], 20))) == [10, 11, 12, 23, 24, FREE]


def test_tokens_of_a_turn_without_routes_are_routed_freely():
    turns = turn([1, 2], [3, 4], 10), turn([1, 2, 3, 4, 5], [6, 7], None), turn([1, 2, 3, 4, 5, 6, 7, 8], [9], 30)
    assert column(merged(*turns)) == [10, 11, 12, FREE, FREE, FREE, 36, 37, FREE]


def test_a_sample_without_any_route_has_no_stream():
    assert ROUTES not in merged(turn([1], [2], None)).streams


@pytest.mark.parametrize("routes", [np.zeros((2, 4), np.uint8), np.zeros((1, 4), np.float32), np.zeros(1, np.uint8)])
def test_routes_that_are_not_one_row_of_numbers_per_computed_token_are_refused(routes: np.ndarray):
    with pytest.raises(ValueError, match="routes"):
        Turn([1], [2], [-0.5], [1], 1.0, routes=routes)


def test_routes_come_back_from_a_batch_file_and_only_for_their_sample(tmp_path: Path):
    whole = merged(turn([1, 2], [3, 4], 10))
    batch = Batch(1, 0, [BatchSample(each, "env", n) for n, each in enumerate([sample(2, 1), whole])])
    (tmp_path / "batch").write_bytes(encode_batch(batch))
    back = [entry.sample for entry in read_batch(tmp_path / "batch").samples]
    assert ROUTES not in back[0].streams
    assert_same(back[1], whole)
    assert column(back[1].truncated(3)) == [10, 11, 12]


def test_a_bin_routes_samples_without_routes_freely():
    plain, routed = sample(2, 1, advantages=[0, 0, 1]), merged(turn([1, 2], [3, 4], 10))
    routed.set_stream("advantages", [0, 0, 1, 1])
    (mixed,) = pack([plain, routed], 16)
    assert mixed.routes is not None
    assert mixed.routes[:, 1].tolist() == [10, 11, 12, FREE, FREE, FREE, FREE]
    assert pack([plain], 16)[0].routes is None
