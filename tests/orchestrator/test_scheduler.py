"""Decisions of the scheduler: order, permits, counting, cancellation."""

import itertools
import random

import pytest

from headrace.orchestrator.scheduler import Episode, Kind, Scheduler
from headrace.rollout.types import Group, Task


def make_scheduler(max_inflight: int = 8, group_size: int = 2) -> Scheduler:
    ids = itertools.count()

    def open_group() -> Group:
        draw = next(ids)
        return Group(f"g{draw}", Task("env", {"n": draw}), group_size, opened_version=0, draw_id=draw)

    return Scheduler(max_inflight, open_group)


def eval_groups(count: int, size: int = 1) -> list[Group]:
    return [Group(f"e{n}", Task("heldout", {"n": n}), size, opened_version=0) for n in range(count)]


def start_all(scheduler: Scheduler, wanted: int) -> list[Episode]:
    return list(iter(lambda: scheduler.next_episode(wanted), None))


def test_finishes_an_open_group_before_it_opens_another():
    episodes = start_all(make_scheduler(max_inflight=5, group_size=2), wanted=100)
    assert [(e.group.id, e.index) for e in episodes] == [("g0", 0), ("g0", 1), ("g1", 0), ("g1", 1), ("g2", 0)]


def test_opens_no_group_beyond_what_is_wanted_but_completes_the_one_it_opened():
    scheduler = make_scheduler(group_size=4)
    assert len(start_all(scheduler, wanted=1)) == 4
    assert scheduler.open_rollouts == 4
    assert scheduler.next_episode(wanted=4) is None


def test_waiting_evaluation_takes_the_next_permits_and_training_resumes_behind_its_tail():
    scheduler = make_scheduler(max_inflight=3, group_size=2)
    running = start_all(scheduler, wanted=100)
    scheduler.queue_eval(eval_groups(2))
    scheduler.arrive(running[0])
    assert scheduler.next_episode(100).kind is Kind.EVAL  # type: ignore[union-attr]
    scheduler.arrive(running[1])
    assert scheduler.next_episode(100).kind is Kind.EVAL  # type: ignore[union-attr]
    scheduler.arrive(running[2])
    # Both evals still run, none is queued: training has the free permit.
    assert scheduler.next_episode(100).kind is Kind.TRAIN  # type: ignore[union-attr]


def test_a_group_is_complete_when_its_last_straggler_arrives_whichever_that_is():
    scheduler = make_scheduler(group_size=3)
    first, second, third = start_all(scheduler, wanted=3)
    assert [scheduler.arrive(e) for e in (third, first, second)] == [False, False, True]
    assert scheduler.open_rollouts == 0


def test_cancelling_a_group_returns_what_is_in_flight_and_stops_its_dispatch():
    scheduler = make_scheduler(max_inflight=2, group_size=3)
    first, second = start_all(scheduler, wanted=3)
    inflight, finished = scheduler.cancel(lambda group: group.id == "g0")
    assert inflight == [first, second]
    assert finished == []
    assert not scheduler.arrive(first)
    assert scheduler.arrive(second)
    assert scheduler.next_episode(3).group.id == "g1"  # type: ignore[union-attr]


def test_cancelling_a_group_with_nothing_in_flight_completes_it_at_once():
    scheduler = make_scheduler(max_inflight=1, group_size=2)
    (only,) = start_all(scheduler, wanted=2)
    scheduler.arrive(only)
    inflight, finished = scheduler.cancel(lambda group: True)
    assert inflight == []
    assert [group.id for group in finished] == ["g0"]
    assert scheduler.open_rollouts == 0


@pytest.mark.parametrize("seed", range(200))
def test_random_traffic_never_leaks_a_permit_and_completes_every_group_once(seed: int):
    rng = random.Random(seed)
    scheduler = make_scheduler(max_inflight=rng.randint(1, 9), group_size=rng.randint(1, 5))
    running: list[Episode] = []
    opened: set[str] = set()
    completed: list[str] = []
    eval_ids = itertools.count()
    for _ in range(300):
        match rng.choice(["start", "start", "arrive", "arrive", "cancel", "eval"]):
            case "start":
                episode = scheduler.next_episode(wanted=rng.randint(0, 20))
                if episode is not None:
                    running.append(episode)
                    opened.add(episode.group.id)
            case "arrive" if running:
                episode = running.pop(rng.randrange(len(running)))
                if scheduler.arrive(episode):
                    completed.append(episode.group.id)
            case "cancel" if rng.random() < 0.2:
                unwanted = {group for group in opened if rng.random() < 0.3}
                _, finished = scheduler.cancel(lambda group, unwanted=unwanted: group.id in unwanted)
                completed += [group.id for group in finished]
            case "eval" if rng.random() < 0.1:
                scheduler.queue_eval([Group(f"e{next(eval_ids)}", Task("heldout", {}), 2, 0) for _ in range(3)])
        assert scheduler.available_permits == scheduler.max_inflight - len(running)
        assert scheduler.available_permits >= 0
        assert sum(scheduler.inflight.values()) == len(running)
    while running or scheduler.queued_evals:
        while (episode := scheduler.next_episode(wanted=0)) is not None:
            running.append(episode)
            opened.add(episode.group.id)
        episode = running.pop()
        if scheduler.arrive(episode):
            completed.append(episode.group.id)
    _, finished = scheduler.cancel(lambda group: True)
    completed += [group.id for group in finished]
    assert sorted(completed) == sorted(opened)
    assert scheduler.open_rollouts == 0
