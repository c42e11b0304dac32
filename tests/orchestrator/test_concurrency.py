"""The limit on episodes in flight against simulated engines and tools, in simulated time."""

from __future__ import annotations

import heapq
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from headrace.inference.schema import Health
from headrace.orchestrator.concurrency import LOGGED_CHANGE, MAX_CAPACITIES, Concurrency

CAPACITY = 64
LOOK = 2.0


class World:
    """Engines that run `CAPACITY` requests at once, and episodes of several turns with a tool between them."""

    def __init__(self, seconds: float, tool: float, turns: int = 4, places: int = CAPACITY, start: int = CAPACITY):
        self.seconds, self.tool, self.turns, self.places = seconds, tool, turns, places
        self.rng = random.Random(0)
        self.concurrency = Concurrency(start, least=8)
        self.now = 0.0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.running = self.in_flight = self.preemptions = 0
        self.line: deque[int] = deque()
        self.limits: list[int] = []
        self.busy: list[float] = []
        self.in_line: list[float] = []

    def after(self, mean: float, what: Callable[[], None]) -> None:
        wait = mean * self.rng.lognormvariate(0, 0.6)
        heapq.heappush(self.agenda, (self.now + wait, next(self.numbers), what))

    def play(self, until: float) -> None:
        """Forgets what was seen before."""
        self.limits, self.busy, self.in_line = [], [], []
        look = self.now + LOOK
        self.begin()
        while self.now < until:
            if not self.agenda or self.agenda[0][0] > look:
                self.now, look = look, look + LOOK
                self.look()
            else:
                self.now, _, what = heapq.heappop(self.agenda)
                what()
            self.begin()

    def begin(self) -> None:
        while self.in_flight < self.concurrency.limit:
            self.in_flight += 1
            self.line.append(self.turns)
        while self.line and self.running < self.places:
            self.running += 1
            self.after(self.seconds, partial(self.answered, self.line.popleft()))

    def answered(self, turns: int) -> None:
        self.running -= 1
        if turns == 1:
            self.in_flight -= 1
        else:
            self.after(self.tool, lambda: self.line.append(turns - 1))

    def update(self, every: float, counted: bool) -> None:
        """New weights: all who run lose their cache, and are held up while it is computed again."""
        self.preemptions += self.running if counted else 0
        self.agenda = [(time + 1.0, number, what) for time, number, what in self.agenda]
        heapq.heappush(self.agenda, (self.now + every, next(self.numbers), partial(self.update, every, counted)))

    def health(self) -> Health:
        return make_health(self.running, len(self.line), preemptions=self.preemptions)

    def look(self) -> None:
        self.concurrency.update({"engine": self.health()}, self.in_flight)
        self.limits.append(self.concurrency.limit)
        self.busy.append(self.running / self.places)
        self.in_line.append(len(self.line) / self.places)


def make_health(
    running: int, waiting: int, kv_usage: float = 0.3, preemptions: int = 0, paused: bool = False, capacity: int = 64
) -> Health:
    return Health(
        "ok", "0-0", "m", running, waiting, paused, capacity, 64, 300, kv_usage=kv_usage, preemptions=preemptions
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("seconds", "tool", "wanted"),
    [
        (10.0, 0.0, 64),
        (10.0, 10.0, 64 * (4 * 10 + 3 * 10) / 40),  # by Little's law: of its time, an episode spends 4/7 in the engine
        (10.0, 60.0, 64 * (4 * 10 + 3 * 60) / 40),
        (2.0, 10.0, 64 * (4 * 2 + 3 * 10) / 8),
    ],
)
def test_the_limit_becomes_what_keeps_the_engine_full_with_a_bounded_line(seconds: float, tool: float, wanted: float):
    world = World(seconds, tool)
    world.play(until=1500.0)
    world.play(until=3000.0)
    assert mean(world.busy) > 0.97
    assert mean(world.in_line) < 0.6
    assert wanted * 0.95 < min(world.limits) <= max(world.limits) < wanted + 1.2 * CAPACITY
    assert max(world.limits) <= 1.25 * min(world.limits)  # and it does not swing


def test_updates_do_not_lower_it_since_whom_they_move_aside_is_not_preempted():
    limits: dict[bool, int] = {}
    for counted in (False, True):
        world = World(10.0, 10.0)
        world.update(every=20.0, counted=counted)
        world.play(until=1500.0)
        world.play(until=3000.0)
        limits[counted] = min(world.limits)
        assert counted or mean(world.busy) > 0.97
    assert limits[False] > 0.95 * 64 * (4 * 10 + 3 * 10) / 40
    assert limits[True] < limits[False]  # what an engine that counted them would come to


def test_tools_that_take_for_ever_do_not_raise_it_without_bound():
    world = World(1.0, 1000.0)
    world.play(until=4000.0)
    assert world.limits[-1] == max(world.limits) == MAX_CAPACITIES * CAPACITY


def test_an_engine_that_slows_down_gets_fewer():
    world = World(10.0, 60.0)
    world.play(until=2000.0)
    before = world.limits[-1]
    world.seconds = 60.0  # the tools are now as fast as it is
    world.play(until=4000.0)
    world.play(until=6000.0)
    assert max(world.limits) < before / 2
    assert mean(world.busy) > 0.97
    assert max(world.in_line) < 1.2


def test_a_start_that_was_far_too_high_is_worked_off():
    world = World(10.0, 0.0, start=10 * CAPACITY)
    world.play(until=1500.0)
    world.play(until=2000.0)
    assert max(world.in_line) <= 1.0
    assert mean(world.busy) == 1.0


def test_a_full_line_is_kept_as_it_was_at_the_start():
    concurrency = Concurrency(64, least=8)
    assert {concurrency.update({"a": make_health(64, 32)}, 96) for _ in range(100)} == {96}


@pytest.mark.parametrize(
    ("report", "limit"),
    [
        (make_health(40, 0), 100),  # 4 of 64 more
        (make_health(40, 10), 96),  # there are some in line: they do not fit, whatever it is that they lack
        (make_health(63, 0), 96),
        (make_health(40, 0, kv_usage=0.9), 96),
        (make_health(40, 0, kv_usage=0.96), 86),  # a tenth less
        (make_health(64, 65), 86),
        (make_health(0, 96, paused=True), 96),
        (msgspec.structs.replace(make_health(40, 0), waits_for_trainer=True), 96),
    ],
)
def test_one_report_moves_it_by_a_step(report: Health, limit: int):
    assert Concurrency(64, least=8).update({"a": report}, 96) == limit


def test_preempted_requests_lower_it_and_a_restarted_engine_resets_the_count():
    concurrency = Concurrency(64, least=8)
    seen = [concurrency.update({"a": make_health(64, 0, preemptions=count)}, 86) for count in (7, 7, 8, 8, 1, 1, 2)]
    assert seen == [96, 96, 86, 86, 86, 86, 77]


def test_it_follows_the_number_of_engines():
    concurrency = Concurrency(64, least=8)
    full = make_health(64, 32)
    limits = [concurrency.update(dict.fromkeys(names, full), 96 * len(names)) for names in ("a", "abc", "ac", "a")]
    assert limits == [96, 288, 192, 96]


def test_no_reports_leave_it_as_it_is():
    concurrency = Concurrency(64, least=8)
    assert {concurrency.update({}, 96) for _ in range(10)} == {96}


def test_it_does_not_grow_while_something_else_keeps_episodes_from_starting():
    concurrency = Concurrency(64, least=8)
    assert {concurrency.update({"a": make_health(10, 0)}, 60) for _ in range(10)} == {96}


def test_it_is_not_lowered_again_before_it_has_taken_effect():
    concurrency = Concurrency(64, least=8)
    full = {"a": make_health(64, 200)}
    assert [concurrency.update(full, in_flight) for in_flight in (96, 96, 90, 87, 86, 86)] == [86, 86, 86, 86, 77, 77]


def test_it_never_falls_below_the_largest_group():
    concurrency = Concurrency(64, least=50)
    limits = [concurrency.update({"a": make_health(10, 100, kv_usage=1.0)}, 0) for _ in range(50)]
    assert min(limits) == limits[-1] == 50
    assert Concurrency(4, least=16).limit == 16


def test_several_engines_count_together_and_the_fullest_cache_decides():
    concurrency = Concurrency(64, least=8)
    small = make_health(20, 0, capacity=32)
    assert concurrency.update({"a": small, "b": small}, 96) == 100
    tight = make_health(20, 0, capacity=32, kv_usage=0.99)
    assert concurrency.update({"a": small, "b": tight}, 100) == 90


def test_only_a_change_by_a_fifth_is_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    concurrency = Concurrency(64, least=8)
    while concurrency.limit <= 96 * (1 + LOGGED_CHANGE):
        assert not caplog.messages
        concurrency.update({"a": make_health(32, 0)}, concurrency.limit)
    (record,) = caplog.records
    assert record.args == (116, 96, 50.0, 64, 0.0)


def record_batches(concurrency: Concurrency, count: int, outdated: int, in_flight: int = 96) -> list[int]:
    return [concurrency.record_batch(100 - outdated, outdated, in_flight) for _ in range(count)]


def test_it_falls_while_long_rollouts_get_too_old_and_only_once_the_last_change_can_show():
    concurrency = Concurrency(64, least=8, max_age=3)
    assert record_batches(concurrency, 8, outdated=6) == [96, 96, 96, 76, 76, 76, 76, 60]
    assert concurrency.update({"a": make_health(40, 0)}, 60) == 60  # free slots do not raise it again


def test_a_few_rollouts_that_are_too_old_leave_it_as_it_is():
    assert set(record_batches(Concurrency(64, least=8, max_age=3), 40, outdated=5)) == {96}


def test_a_limit_for_age_counts_from_what_is_in_flight_and_keeps_the_largest_group():
    assert record_batches(Concurrency(64, least=8, max_age=3), 4, outdated=50, in_flight=40)[-1] == 32
    assert record_batches(Concurrency(64, least=30, max_age=3), 4, outdated=50, in_flight=20)[-1] == 30


def test_it_may_grow_again_when_nothing_is_too_old():
    concurrency = Concurrency(64, least=8, max_age=3)
    record_batches(concurrency, 4, outdated=50, in_flight=40)
    record_batches(concurrency, 8, outdated=0)
    assert concurrency.update({"a": make_health(32, 0)}, 32) == 36  # 4 of 64 more, and twice a tenth would allow 38
    assert concurrency.update({"a": make_health(36, 0)}, 36) == 38
