"""How many requests are decoded together on a GPU."""

from __future__ import annotations

import pytest

from headrace.inference.memory import MAX_RUNNING, MIN_RUNNING, choose_max_running, decode_step_s
from headrace.inference.model_shape import ModelShape
from tests.inference.shapes import QWEN_05B, QWEN_4B, QWEN_14B, QWEN_32B

PLENTY = 1 << 40


@pytest.mark.parametrize(
    ("shape", "longest", "running"),
    [
        (QWEN_05B, 1024, 1024),  # latencies dominate: more requests are almost free
        (QWEN_4B, 1024, 512),
        (QWEN_4B, 16384, 256),  # reading keys and values dominates: twice as many take twice as long
        (QWEN_14B, 1024, 256),  # multiplying dominates
        (QWEN_32B, 1024, 256),
    ],
)
def test_requests_are_added_while_that_raises_the_tokens_per_second(
    shape: ModelShape, longest: int, running: int
) -> None:
    assert choose_max_running(shape, PLENTY, longest) == running


def test_a_cache_that_does_not_hold_more_requests_of_half_the_length_limits_them() -> None:
    needed = 512 * 512 * QWEN_05B.kv_bytes(2)
    assert choose_max_running(QWEN_05B, needed, 1024) == 512
    assert choose_max_running(QWEN_05B, needed - 1, 1024) == MIN_RUNNING
    assert choose_max_running(QWEN_05B, 0, 1024) == MIN_RUNNING  # shorter requests may fit, others are preempted


@pytest.mark.parametrize(("in_flight", "running"), [(1, 256), (256, 256), (384, 512), (512, 512), (5000, MAX_RUNNING)])
def test_there_are_no_more_slots_than_requests_in_flight(in_flight: int, running: int) -> None:
    assert choose_max_running(QWEN_05B, PLENTY, 1024, in_flight) == running


@pytest.mark.parametrize(("shape", "measured_ms"), [(QWEN_05B, 3.2), (QWEN_4B, 8.8)])
def test_the_estimate_of_a_step_is_near_what_was_measured(shape: ModelShape, measured_ms: float) -> None:
    """256 requests of 117 prompt tokens and on average half of 283 completion tokens on an H200."""
    assert 1e3 * decode_step_s(shape, 256, 117 + 283 // 2) == pytest.approx(measured_ms, rel=0.25)
