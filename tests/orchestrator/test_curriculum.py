"""Samplers, gates and the circuit breaker of environments; the numbers are worked by hand."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from headrace.algorithms.base import RolloutView
from headrace.config.environments import CurriculumConfig
from headrace.orchestrator.curriculum import CurriculumFailed, DifficultyPool, InOrder, TaskSampler
from headrace.orchestrator.gate import AdvantageRange, Gate
from headrace.orchestrator.source import (
    FIRST_PAUSE_DRAWS,
    MAX_FAILED_EPISODES,
    MAX_PAUSE_DRAWS,
    EnvironmentBreaker,
    TrainSource,
    TrainTasks,
)
from headrace.rollout.types import Rollout, Sample, Task
from headrace.transport.journal_entries import DrawResult
from tests.refusals import refused

WEIGHTS = {"unseen": 1.0, "hard": 0.2, "normal": 1.0, "easy": 0.2}


def tasks(count: int, env: str = "env") -> list[Task]:
    return [Task(env, {"n": n}) for n in range(count)]


def pool(count: int, **weights: float) -> DifficultyPool:
    return DifficultyPool(tasks(count), 0.25, 0.75, {**WEIGHTS, **weights})


def shares(sampler: DifficultyPool) -> dict[str, float]:
    return {name: share for name, share in sampler.metrics().items() if share}


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 0.5], "hard"),  # mean .25, both bounds belong to the pool below
        ([0.0, 0.0, 1.0], "normal"),
        ([0.5, 1.0], "normal"),  # mean .75
        ([1.0, 1.0, 0.5], "easy"),
        ([3.0], "easy"),
    ],
)
def test_a_task_is_in_the_pool_of_the_mean_reward_of_its_group(rewards: list[float], expected: str):
    sampler = pool(1)
    assert shares(sampler) == {"unseen": 1.0}
    sampler.observe(sampler.tasks[0], rewards)
    assert shares(sampler) == {expected: 1.0}


def test_in_order_tasks_come_as_they_are_listed_and_then_again():
    sampler = InOrder(tasks(3))
    assert not sampler.learns()
    source = TrainSource([TrainTasks("env", tasks(3), 1.0, sampler)], seed=5)
    assert [source.draw()[1].data["n"] for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    resumed = TrainSource([TrainTasks("env", tasks(3), 1.0, sampler)], seed=5, drawn={"env": 7})
    assert resumed.draw()[1].data["n"] == 1


def test_only_the_latest_group_of_a_task_counts():
    sampler = pool(4)
    for reward in (0.0, 1.0, 0.5):
        sampler.observe(sampler.tasks[2], [reward])
    assert shares(sampler) == {"unseen": 0.75, "normal": 0.25}


def test_tasks_are_drawn_by_the_weights_of_their_pools():
    sampler = pool(4)
    for number, reward in enumerate((0.0, 0.5, 1.0)):
        sampler.observe(sampler.tasks[number], [reward])
    counts = Counter(sampler.draw(n, random.Random(n)).data["n"] for n in range(4800))
    expected = {0: 400, 1: 2000, 2: 400, 3: 2000}  # of 2.4 in all: .2, 1, .2, 1; standard deviations 19 and 34
    assert all(abs(counts[n] - count) < 150 for n, count in expected.items())


def test_a_pool_of_weight_0_is_left_alone_unless_there_is_nothing_else():
    sampler = pool(2, unseen=0.0)
    sampler.observe(sampler.tasks[0], [0.5])
    assert {sampler.draw(n, random.Random(n)).data["n"] for n in range(50)} == {0}
    sampler = pool(2, unseen=0.0)
    assert {sampler.draw(n, random.Random(n)).data["n"] for n in range(50)} == {0, 1}


@pytest.mark.parametrize("seed", range(20))
def test_pools_stay_apart_and_complete_however_tasks_move(seed: int):
    rng = random.Random(seed)
    sampler, latest = pool(7), dict.fromkeys(range(7), "unseen")
    for _ in range(100):
        number, reward = rng.randrange(7), rng.choice([0.0, 0.5, 1.0])
        sampler.observe(sampler.tasks[number], [reward])
        latest[number] = {0.0: "hard", 0.5: "normal", 1.0: "easy"}[reward]
        assert shares(sampler) == {name: count / 7 for name, count in Counter(latest.values()).items()}


def test_a_task_that_is_listed_twice_is_one_task_with_twice_the_weight():
    sampler = DifficultyPool([Task("env", {"n": 0})] * 2, 0.25, 0.75, WEIGHTS)
    sampler.observe(sampler.tasks[0], [1.0])
    assert shares(sampler) == {"easy": 1.0}


# -- the source -------------------------------------------------------------------------------------------------------


def pooled_source(drawn: int = 0) -> TrainSource:
    given = tasks(9)
    return TrainSource([TrainTasks("env", given, 1.0, DifficultyPool(given, 0.25, 0.75, WEIGHTS))], 3, {"env": drawn})


def test_a_source_that_hears_the_past_again_draws_what_it_would_have_drawn():
    rng = random.Random(0)
    uninterrupted, results, expected = pooled_source(), [], []
    for _ in range(60):
        draw, task = uninterrupted.draw()
        results.append(DrawResult(draw.id, "env", task.key, [rng.choice([0.0, 0.5, 1.0])]))
        expected.append(task)
        uninterrupted.add_result(results[-1])
        uninterrupted.learn()
    resumed = pooled_source(drawn=40)
    for result in results[:40]:
        resumed.add_result(result)
    resumed.learn()
    again = []
    for result in results[40:]:
        again.append(resumed.draw()[1])
        resumed.add_result(result)
        resumed.learn()
    assert again == expected[40:]
    assert resumed.metrics() == uninterrupted.metrics()


def test_what_is_heard_changes_no_draw_before_it_is_learned():
    patient, eager = pooled_source(), pooled_source()
    for n, task in enumerate(tasks(9)):
        patient.add_result(DrawResult(n, "env", task.key, [1.0]))
    assert [patient.draw() for _ in range(5)] == [eager.draw() for _ in range(5)]
    assert patient.metrics()["curriculum/env/unseen"] == 1.0
    patient.learn()
    assert patient.metrics()["curriculum/env/easy"] == 1.0


def test_results_about_tasks_and_environments_that_are_gone_are_left_out():
    source = pooled_source()
    for result in (DrawResult(0, "env", "gone", [1.0]), DrawResult(1, "other", "gone", [], failed=99)):
        source.add_result(result)
    source.learn()
    assert source.metrics()["curriculum/env/unseen"] == 1.0


def two(ratio: float = 1.0) -> TrainSource:
    return TrainSource([TrainTasks("good", tasks(3, "good"), 1.0), TrainTasks("bad", tasks(3, "bad"), ratio)], 0)


def test_an_environment_that_only_fails_is_paused_then_tried_once_then_paused_for_longer(
    caplog: pytest.LogCaptureFixture,
):
    source, drawn = two(), []
    for _ in range(200):
        draw, task = source.draw()
        drawn.append(draw.env)
        failed = 4 if draw.env == "bad" else 0
        source.add_result(
            DrawResult(draw.id, draw.env, task.key, [] if failed else [1.0], failed, error="environment: a bug")
        )
        source.learn()
    tries = [n for n, env in enumerate(drawn) if env == "bad"]
    pauses = np.diff(tries)
    assert all(pause < 10 for pause in pauses[:3])  # four groups of four episodes
    assert [pause > rest for pause, rest in zip(pauses[3:6], (16, 32, 64), strict=True)] == [True] * 3
    assert caplog.records[0].args == ("bad", "environment: a bug", 16)


def test_an_environment_that_works_again_is_drawn_as_before(caplog: pytest.LogCaptureFixture):
    source = two()
    for n in range(4):
        source.add_result(DrawResult(n, "bad", "x", [], 4, error="environment: a bug"))
    source.add_result(DrawResult(9, "bad", "x", [0.0]))
    source.learn()
    assert Counter(source.draw()[0].env for _ in range(200))["bad"] > 60
    assert caplog.records[-1].args == ("bad",)


def test_if_every_environment_is_paused_all_are_drawn():
    source = two()
    for env in ("good", "bad"):
        source.add_result(DrawResult(0, env, "x", [], 99))
    source.learn()
    assert set(Counter(source.draw()[0].env for _ in range(30))) == {"good", "bad"}


def test_pauses_double_up_to_a_maximum():
    breaker, pauses, draw = EnvironmentBreaker(), [], 0
    for _ in range(12):
        pause = breaker.record_failure(draw, MAX_FAILED_EPISODES)
        pauses.append(pause)
        draw += pause + 1
        assert breaker.is_paused(draw - 1)
        assert not breaker.is_paused(draw)
    assert pauses[:3] == [FIRST_PAUSE_DRAWS, 2 * FIRST_PAUSE_DRAWS, 4 * FIRST_PAUSE_DRAWS]
    assert pauses[-1] == MAX_PAUSE_DRAWS


def test_there_is_one_trial_at_a_time_and_a_cancelled_one_is_replaced():
    breaker = EnvironmentBreaker()
    breaker.record_failure(0, MAX_FAILED_EPISODES)
    breaker.record_draw(17)
    assert breaker.is_paused(18)
    breaker.record_cancelled(17)
    assert not breaker.is_paused(18)
    breaker.record_draw(18)
    assert breaker.record_success(18)
    assert not breaker.is_paused(19)
    assert breaker.record_failure(16, 99) == 0  # drawn before the success


# -- gates ------------------------------------------------------------------------------------------------------------


def group(*advantages: float | None, masked: float = 0.0) -> list[RolloutView]:
    """Rollouts of one trained token each, beside one that is not trained on."""
    views = []
    for value in advantages:
        sample = Sample([1, 2, 3], [False, False, True], [0, 0, -1.0], [-1, -1, 0], 1)
        if value is not None:
            sample.set_stream("advantages", [0.0, masked, value])
        views.append(RolloutView(Rollout(samples=[sample]), Task("env", {})))
    return views


@pytest.mark.parametrize(
    ("advantages", "keeps"),
    [((0.0, 0.0), False), ((0.0, 0.2), False), ((-0.1, 0.2), False), ((0.0, 0.21), True), ((-0.11,), True)],
)
def test_a_group_is_rejected_when_every_advantage_lies_in_the_range_its_ends_included(
    advantages: tuple[float, ...], keeps: bool
):
    assert AdvantageRange(-0.1, 0.2).keeps(group(*advantages)) is keeps


def test_tokens_that_are_not_trained_on_do_not_save_a_group():
    assert not AdvantageRange(0.0, 0.0).keeps(group(0.0, masked=5.0))


def test_without_advantages_every_group_passes():
    assert AdvantageRange(0.0, 0.0).keeps(group(None, None))


# -- your own ---------------------------------------------------------------------------------------------------------


class Longest(TaskSampler):
    def __init__(self, given, step: int = 1) -> None:
        super().__init__(given)
        self.step = step

    def draw(self, position, rng):
        return self.tasks[-1 - position * self.step % len(self.tasks)]


class ForeignTask(TaskSampler):
    def draw(self, position, rng):
        return Task("env", {"n": -1})


class Raising(Longest):
    def observe(self, task, rewards):
        raise ZeroDivisionError("as it happens")


class Never(Gate):
    def keeps(self, group):
        return False


HERE = "tests.orchestrator.test_curriculum"


def curriculum(**keys: Any) -> CurriculumConfig:
    return CurriculumConfig.model_validate(keys)


def check_imports(config: CurriculumConfig) -> None:
    for chosen in (config.sampler, config.gate):
        if chosen is not None:
            chosen.check_imports()


def test_users_samplers_and_gates_are_found_by_import_path_with_their_kwargs():
    config = curriculum(sampler={"type": f"{HERE}:Longest", "kwargs": {"step": 2}}, gate=f"{HERE}:Never")
    check_imports(config)
    assert config.sampler is not None and config.gate is not None
    sampler, gate = config.sampler.make(tasks(5)), config.gate.make()
    source = TrainSource([TrainTasks("env", tasks(5), 1.0, sampler)], 0)
    assert [source.draw()[1].data["n"] for _ in range(3)] == [4, 2, 0]
    assert isinstance(gate, Never)


@pytest.mark.parametrize(
    ("keys", "key", "value"),
    [
        ({"sampler": f"{HERE}:Missing"}, "sampler.type", f"{HERE}:Missing"),
        ({"sampler": f"{HERE}:Never"}, "sampler.type", f"{HERE}:Never"),
        ({"sampler": {"type": f"{HERE}:Longest", "kwargs": {"pace": 2}}}, "sampler.type", f"{HERE}:Longest"),
        ({"gate": f"{HERE}:Longest"}, "gate.type", f"{HERE}:Longest"),
    ],
)
def test_code_that_cannot_be_used_is_refused_before_anything_starts(keys: dict[str, Any], key: str, value: str):
    with refused(key=key, value=value):
        check_imports(curriculum(**keys))


def test_a_sampler_that_fails_ends_the_run_in_one_sentence_that_names_it():
    foreign = TrainSource([TrainTasks("maze", tasks(2), 1.0, ForeignTask(tasks(2)))], 0)
    with pytest.raises(CurriculumFailed, match=r"'maze'.*ForeignTask\.draw"):
        foreign.draw()
    raising = TrainSource([TrainTasks("maze", tasks(2), 1.0, Raising(tasks(2)))], 0)
    raising.add_result(DrawResult(0, "maze", tasks(2)[0].key, [1.0]))
    with pytest.raises(CurriculumFailed, match=r"'maze'.*Raising\.observe.*ZeroDivisionError"):
        raising.learn()


def test_sections_that_make_no_sense_are_refused():
    for keys, named in (
        ({"sampler": {"type": "difficulty_pool", "hard_max": 0.8}}, "hard_max"),
        ({"sampler": {"type": "difficulty_pool", "weights": dict.fromkeys(WEIGHTS, 0)}}, "weights"),
        ({"gate": {"type": "advantage_range", "reject_min": 1}}, "reject_min"),
        ({"sampler": "difficulty"}, "difficulty_pool"),
    ):
        with pytest.raises(ValueError, match=named):
            curriculum(**keys)


def test_an_environments_own_sampler_and_gate_go_before_those_that_all_inherit():
    default = curriculum(sampler="difficulty_pool", gate="advantage_range")
    own = curriculum(gate="none").over(default)
    assert own.sampler is not None and isinstance(own.sampler.make(tasks(2)), DifficultyPool)
    assert own.gate is not None and own.gate.make() is None
    shuffled = curriculum(sampler="shuffled").over(default).sampler
    assert shuffled is not None and shuffled.make(tasks(2)) is None
