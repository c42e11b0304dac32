"""Samples for tests: by hand, and drawn at random."""

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from headrace.rollout.types import KNOWN_STREAMS, Sample

FIXED = settings(deadline=None, max_examples=40, derandomize=True)
"""The same examples on every run, and no deadline: machines that run tests are busy."""

STREAM_NAMES = [*KNOWN_STREAMS, "teacher_entropy"]
"""The last is a stream of a later version."""


def sample(prompt: int, completion: int, **streams: list[float]) -> Sample:
    """Tokens 0, 1, 2, ...; the completion was sampled by version 3 with logprob -0.5."""
    length = prompt + completion
    made = Sample(
        np.arange(length),
        [False] * prompt + [True] * completion,
        [0.0] * prompt + [-0.5] * completion,
        [-1] * prompt + [3] * completion,
        prompt,
    )
    for name, values in streams.items():
        made.set_stream(name, values)
    return made


def floats32() -> st.SearchStrategy[float]:
    return st.floats(-1e6, 1e6, width=32)


@st.composite
def samples(draw: Any, min_length: int = 0, max_length: int = 8, trainable: bool = False) -> Sample:
    length = draw(st.integers(min_length, max_length))
    prompt = draw(st.integers(0, length))

    def per_token(values: Any) -> list[Any]:
        return draw(st.lists(values, min_size=length, max_size=length))

    made = Sample(
        per_token(st.integers(0, 2**31 - 1)),
        per_token(st.booleans()),
        per_token(floats32()),
        per_token(st.integers(-1, 10_000)),
        prompt,
        draw(st.floats(0.01, 10)),
        draw(st.lists(st.tuples(*[st.integers(0, 1000)] * 4), max_size=3)),
    )
    names = draw(st.sets(st.sampled_from(STREAM_NAMES)))
    for name in names | ({"advantages", "ref_logprobs"} if trainable else set()):
        made.set_stream(name, per_token(floats32()))
    return made


def assert_same(left: Sample, right: Sample) -> None:
    for name in ("token_ids", "mask", "logprobs", "versions"):
        mine, other = getattr(left, name), getattr(right, name)
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other, err_msg=name)
    assert (left.prompt_length, left.temperature) == (right.prompt_length, right.temperature)
    assert [tuple(row) for row in left.obs_spans] == [tuple(row) for row in right.obs_spans]
    assert left.streams.keys() == right.streams.keys()
    for name, values in left.streams.items():
        np.testing.assert_array_equal(values, right.streams[name], err_msg=name)
