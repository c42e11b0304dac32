"""Decisions of the scheduler: order, permits, counting, cancellation."""

import itertools
import random

import pytest

from headrace.orchestrator.scheduler import EpisodeScheduler
from headrace.orchestrator.signals import Episode, Kind
from headrace.rollout.types import Group, Rollout, Task


def make_scheduler(
    max_inflight: int = 8,
    group_size: int = 2,
    together: bool = False,
    opened: set[str] | None = None,
    whole_groups: bool = False,
) -> EpisodeScheduler:
    ids = itertools.count()

    def open_group() -> Group:
        draw = next(ids)
        if opened is not None:
            opened.add(f"g{draw}")
        return Group(
            f"g{draw}", Task("env", {"n": draw}), group_size, opened_version=0, draw_id=draw, together=together
        )

    return EpisodeScheduler(max_inflight, open_group, whole_groups)


def eval_groups(count: int, size: int = 1) -> list[Group]:
    return [Group(f"e{n}", Task("heldout", {"n": n}), size, opened_version=0) for n in range(count)]


def start_all(scheduler: EpisodeScheduler, wanted: int) -> list[Episode]:
    return list(iter(lambda: scheduler.next_episode(wanted), None))


def test_finishes_an_open_group_before_it_opens_another():
    episodes = start_all(make_scheduler(max_inflight=5, group_size=2), wanted=100)
    assert [(e.group.id, e.index) for e in episodes] == [("g0", 0), ("g0", 1), ("g1", 0), ("g1", 1), ("g2", 0)]


def test_opens_no_group_beyond_what_is_wanted_but_completes_the_one_it_opened():
    scheduler = make_scheduler(group_size=4)
    assert len(start_all(scheduler, wanted=1)) == 4
    assert scheduler.open_episodes == 4
    assert scheduler.next_episode(wanted=4) is None


def test_a_lower_limit_starts_nothing_until_enough_arrived_and_a_higher_one_applies_at_once():
    scheduler = make_scheduler(max_inflight=6, group_size=2)
    running = start_all(scheduler, wanted=100)
    scheduler.max_inflight = 4
    assert scheduler.free_slots == 0
    for episode in running[:2]:
        scheduler.arrive(episode, [])
        assert scheduler.next_episode(100) is None
    scheduler.arrive(running[2], [])
    assert len(start_all(scheduler, wanted=100)) == 1
    scheduler.max_inflight = 7
    assert len(start_all(scheduler, wanted=100)) == 3


def test_waiting_evaluation_takes_the_next_permits_and_training_resumes_behind_its_tail():
    scheduler = make_scheduler(max_inflight=3, group_size=2)
    running = start_all(scheduler, wanted=100)
    scheduler.queue_eval(eval_groups(2))
    scheduler.arrive(running[0], [])
    assert scheduler.next_episode(100).kind is Kind.EVAL  # type: ignore[union-attr]
    scheduler.arrive(running[1], [])
    assert scheduler.next_episode(100).kind is Kind.EVAL  # type: ignore[union-attr]
    scheduler.arrive(running[2], [])
    # Both evals still run, none is queued: training has the free permit.
    assert scheduler.next_episode(100).kind is Kind.TRAIN  # type: ignore[union-attr]


def test_a_group_is_complete_when_its_last_straggler_arrives_whichever_that_is():
    scheduler = make_scheduler(group_size=3)
    first, second, third = start_all(scheduler, wanted=3)
    said = [scheduler.arrive(e, [Rollout(agent=str(e.index))]) for e in (third, first, second)]
    assert said[:2] == [[], []]
    (complete,) = said[2]
    assert [rollout.agent for rollout in complete.rollouts] == ["0", "1", "2"]  # by place, not by arrival
    assert scheduler.open_episodes == 0


def test_cancelling_a_group_returns_what_is_in_flight_and_stops_its_dispatch():
    scheduler = make_scheduler(max_inflight=2, group_size=3)
    first, second = start_all(scheduler, wanted=3)
    inflight, finished = scheduler.cancel(lambda group: group.id == "g0", "off_policy")
    assert inflight == [first, second]
    assert finished == []
    assert scheduler.arrive(first, []) == []
    (complete,) = scheduler.arrive(second, [])
    assert complete.cancelled == "off_policy"
    assert scheduler.next_episode(3).group.id == "g1"  # type: ignore[union-attr]


def test_cancelling_a_group_with_nothing_in_flight_completes_it_at_once():
    scheduler = make_scheduler(max_inflight=1, group_size=2)
    (only,) = start_all(scheduler, wanted=2)
    scheduler.arrive(only, [])
    inflight, finished = scheduler.cancel(lambda group: True, "max_steps")
    assert inflight == []
    assert [(complete.group.id, complete.cancelled) for complete in finished] == [("g0", "max_steps")]
    assert scheduler.open_episodes == 0


@pytest.mark.parametrize(("whole_groups", "next_group"), [(False, "g1"), (True, None)])
def test_a_straggler_leaves_the_permits_of_its_group_idle_only_where_nothing_may_be_sampled_in_vain(
    whole_groups: bool, next_group: str | None
):
    scheduler = make_scheduler(group_size=4, whole_groups=whole_groups)
    running = start_all(scheduler, wanted=4)
    for episode in running[:3]:
        scheduler.arrive(episode, [])
    following = scheduler.next_episode(wanted=4)
    assert (following.group.id if following else None) == next_group


def test_whole_groups_come_back_in_the_order_in_which_they_were_opened_and_evaluation_as_it_ends():
    scheduler = make_scheduler(max_inflight=5, group_size=1, whole_groups=True)
    first, second, third = start_all(scheduler, wanted=3)
    scheduler.queue_eval(eval_groups(1))
    (heldout,) = start_all(scheduler, wanted=0)
    arrived = [[c.group.id for c in scheduler.arrive(e, [])] for e in (third, heldout, second, first)]
    assert arrived == [[], ["e0"], [], ["g0", "g1", "g2"]]
    assert scheduler.open_episodes == 0


def test_a_group_that_belongs_together_waits_until_it_has_all_its_permits():
    scheduler = make_scheduler(max_inflight=5, group_size=3, together=True)
    first = start_all(scheduler, wanted=100)
    assert [e.group.id for e in first] == ["g0"] * 3
    scheduler.queue_eval(eval_groups(1))
    assert scheduler.next_episode(100).kind is Kind.EVAL  # type: ignore[union-attr]
    assert scheduler.next_episode(100) is None  # one permit is free, and kept for the group that waits
    scheduler.arrive(first[0], [])
    assert scheduler.next_episode(100) is None
    scheduler.arrive(first[1], [])
    assert [e.group.id for e in start_all(scheduler, wanted=100)] == ["g1"] * 3


@pytest.mark.parametrize("seed", range(200))
def test_random_traffic_never_leaks_a_permit_and_completes_every_group_once(seed: int):
    rng = random.Random(seed)
    group_size = rng.randint(1, 5)
    opened: set[str] = set()
    scheduler = make_scheduler(rng.randint(group_size, 9), group_size, rng.random() < 0.3, opened, seed % 2 == 0)
    running: list[Episode] = []
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
                completed += [complete.group.id for complete in scheduler.arrive(episode, [])]
            case "cancel" if rng.random() < 0.2:
                unwanted = {group for group in opened if rng.random() < 0.3}
                _, finished = scheduler.cancel(lambda group, unwanted=unwanted: group.id in unwanted, "off_policy")
                completed += [complete.group.id for complete in finished]
            case "eval" if rng.random() < 0.1:
                scheduler.queue_eval([Group(f"e{next(eval_ids)}", Task("heldout", {}), 2, 0) for _ in range(3)])
        assert scheduler.free_slots == scheduler.max_inflight - len(running)
        assert scheduler.free_slots >= 0
        assert sum(scheduler.inflight.values()) == len(running)
    while running or scheduler.queued_evals:
        while (episode := scheduler.next_episode(wanted=0)) is not None:
            running.append(episode)
            opened.add(episode.group.id)
        episode = running.pop()
        completed += [complete.group.id for complete in scheduler.arrive(episode, [])]
    _, finished = scheduler.cancel(lambda group: True, "max_steps")
    completed += [complete.group.id for complete in finished]
    assert sorted(completed) == sorted(opened)
    assert scheduler.open_episodes == 0
