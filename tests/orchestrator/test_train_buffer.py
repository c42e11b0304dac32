"""Finished groups until they fill a batch."""

import math

from headrace.orchestrator.signals import Kind, ScoredGroup
from headrace.orchestrator.train_buffer import EpisodeCapacity, TrainBuffer
from headrace.rollout.types import Group, Rollout, Sample, Task


def group(name: str, size: int = 2, tokens: int = 5) -> ScoredGroup:
    sample = Sample([1] * tokens, [True] * tokens, [0.0] * tokens, [0] * tokens, 0)
    rollouts = [Rollout(samples=[sample]) for _ in range(size)]
    return ScoredGroup(Kind.TRAIN, Group(name, Task("env", {}), size, 0), rollouts, [])


def names(groups: list[ScoredGroup]) -> list[str]:
    return [scored.group.id for scored in groups]


def test_the_group_that_fills_the_batch_says_so():
    buffer = TrainBuffer(batch_size=4, token_batch_size=None, seq_len=64)
    assert not buffer.add(group("a"))
    assert buffer.take_batch() is None
    assert buffer.add(group("b"))


def test_a_batch_takes_the_oldest_whole_groups_and_leaves_the_rest():
    buffer = TrainBuffer(batch_size=3, token_batch_size=None, seq_len=64)
    for name in ("a", "b", "c"):
        buffer.add(group(name))
    batch = buffer.take_batch()
    assert batch is not None
    assert names(batch.groups) == ["a", "b"]
    assert buffer.rollouts == 2
    assert buffer.take_batch() is None


def test_a_batch_by_tokens_holds_whole_groups_too():
    buffer = TrainBuffer(batch_size=None, token_batch_size=25, seq_len=64)
    for name in ("a", "b", "c", "d"):
        buffer.add(group(name))
    batch = buffer.take_batch()
    assert batch is not None
    assert names(batch.groups) == ["a", "b", "c"]
    assert (buffer.rollouts, buffer.tokens) == (2, 10)


def test_a_batch_by_tokens_is_judged_by_the_lengths_credited_also_while_the_buffer_is_empty():
    buffer = TrainBuffer(batch_size=None, token_batch_size=100, seq_len=50)
    assert buffer.rollouts_per_batch == 2  # nothing seen: rollouts may be as long as seq_len
    buffer.record_lengths(step=1, rollouts=4, tokens=40)
    assert (buffer.rollouts, buffer.rollouts_per_batch) == (0, 10)


def test_lengths_of_the_step_before_count_until_the_next_and_those_before_them_no_more():
    buffer = TrainBuffer(batch_size=None, token_batch_size=100, seq_len=50)
    buffer.record_lengths(step=1, rollouts=4, tokens=4)
    buffer.record_lengths(step=3, rollouts=1, tokens=20)  # nothing was credited in step 2
    assert buffer.rollouts_per_batch == 21  # 5 rollouts have 24 tokens
    buffer.record_lengths(step=4, rollouts=1, tokens=30)
    assert buffer.rollouts_per_batch == 4  # 2 rollouts have 50 tokens


def test_what_is_missing_is_counted_in_tokens_and_never_nothing_before_the_batches_are_full():
    buffer = TrainBuffer(batch_size=None, token_batch_size=100, seq_len=50)
    buffer.record_lengths(step=1, rollouts=10, tokens=200)
    buffer.add(group("a", size=9, tokens=11))
    assert (buffer.missing(1), buffer.missing(2)) == (1, 6)  # 1 token, and 101: 20 in each
    buffer.add(group("b", size=1, tokens=1))
    assert (buffer.missing(1), buffer.missing(2)) == (0, 5)


def test_of_a_batch_by_rollouts_those_are_missing_that_are_not_here():
    buffer = TrainBuffer(batch_size=4, token_batch_size=None, seq_len=64)
    buffer.record_lengths(step=1, rollouts=1, tokens=1)
    buffer.add(group("a", size=3))
    assert (buffer.rollouts_per_batch, buffer.missing(1), buffer.missing(2)) == (4, 1, 5)


def test_a_buffer_reports_how_much_of_the_next_batch_it_has():
    by_rollouts = TrainBuffer(batch_size=3, token_batch_size=None, seq_len=64)
    by_tokens = TrainBuffer(batch_size=None, token_batch_size=25, seq_len=64)
    for buffer in (by_rollouts, by_tokens):
        buffer.add(group("a"))
    assert by_rollouts.progress == ("rollouts", 2, 3)
    assert by_tokens.progress == ("tokens", 10, 25)
    by_rollouts.add(group("b"))
    assert by_rollouts.progress == ("rollouts", 3, 3)


def test_dropped_groups_no_longer_count():
    buffer = TrainBuffer(batch_size=4, token_batch_size=None, seq_len=64)
    for name in ("a", "b"):
        buffer.add(group(name))
    assert names(buffer.drop(lambda scored: scored.group.id == "a")) == ["a"]
    assert (buffer.rollouts, buffer.tokens) == (2, 10)
    assert not buffer.is_full


def wave(capacity: EpisodeCapacity, rollouts: int) -> int:
    capacity.begin_wave(rollouts)
    return capacity.rest_of_wave


def test_a_wave_is_what_is_missing_while_nothing_is_rejected():
    capacity = EpisodeCapacity(in_waves=True, batch_size=64, group_size=8)
    assert wave(capacity, 64) == 64
    for draw in range(8):
        capacity.record_kept(draw, credited=8, kept=8)
    capacity.begin_step(surplus=[])
    assert wave(capacity, 64) == 64


def test_a_wave_allows_for_what_the_waves_before_it_lost():
    capacity = EpisodeCapacity(in_waves=True, batch_size=64, group_size=8)
    for draw in range(8):
        capacity.record_kept(draw, credited=8, kept=8 * (draw % 2))
    # 32 are missing and half is kept: 64, and 2 * sqrt(32 * 8 * .5) = 22.6 for one standard deviation
    assert wave(capacity, 32) == 87


def test_a_step_begins_with_what_the_last_one_needed_and_not_with_its_surplus():
    capacity = EpisodeCapacity(in_waves=True, batch_size=64, group_size=8)
    for draw in range(30):  # the even ones are rejected: draw 15 fills the batch, 17 to 29 are in surplus
        capacity.record_kept(draw, credited=8, kept=8 * (draw % 2))
    capacity.begin_step(surplus=range(17, 30, 2))
    # 17 draws credited 136, and kept at most 71 of them, with less than a group to spare
    share = 71 / 136
    assert wave(capacity, 64) == math.ceil(math.ceil((64 + math.sqrt(64 * 8 * (1 - share))) / share))


def test_a_wave_has_at_most_eight_times_what_is_missing_and_a_margin():
    capacity = EpisodeCapacity(in_waves=True, batch_size=64, group_size=8)
    capacity.record_kept(0, credited=800, kept=1)
    assert wave(capacity, 64) == math.ceil(8 * (64 + math.sqrt(64 * 8 * 7 / 8)))


def test_a_resumed_run_has_the_waves_of_an_uninterrupted_one():
    uninterrupted, resumed = (EpisodeCapacity(in_waves=True, batch_size=64, group_size=8) for _ in range(2))
    credited = dict.fromkeys(range(30), 8)
    for draw, count in credited.items():
        uninterrupted.record_kept(draw, count, kept=count * (draw % 3 == 0))
    uninterrupted.begin_step(surplus=[27])
    resumed.begin_step(surplus=[27], credited=credited)
    assert wave(uninterrupted, 64) == wave(resumed, 64) > 128
