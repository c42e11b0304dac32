"""History of a run from `metrics.jsonl`, restarts included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.observe.metrics import History, MetricsLog, Tail


def step(number: int, reward: float) -> dict[str, Any]:
    values = {"reward/all/mean": reward, "progress/rollouts": 8 * number}
    return {"step": number, "time": float(number), "process": "orchestrator", **values}


def trained(number: int, loss: float) -> dict[str, Any]:
    return {"step": number, "time": float(number), "process": "trainer", "loss": loss}


def evaluated(version: int, **scores: float) -> dict[str, Any]:
    values = {f"eval/{env}/avg@4": score for env, score in scores.items()}
    return {"step": version, "time": float(version), "process": "orchestrator", **values}


def of(incarnation: int, *records: dict[str, Any]) -> list[dict[str, Any]]:
    names = {"trainer": "progress/incarnation", "orchestrator": "eval/incarnation"}
    return [{**record, names[record["process"]]: incarnation} for record in records]


def test_the_tail_hands_out_each_record_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    log = MetricsLog(path, "trainer")
    log.log(1, {"loss": 1.0})
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "time": 2.0, "lo')
    assert [record["step"] for record in tail.read()] == [1]
    with open(path, "ab") as file:
        file.write(b'ss": 2}\n')
    assert [record["step"] for record in tail.read()] == [2]
    assert tail.read() == []


def test_a_line_that_a_full_disk_cut_in_two_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "time": 1}\n{"step": 2, "re{"step": 3}\n{"step": 4, "time": 4}\n')
    assert [record["step"] for record in Tail(path).read()] == [1, 4]


def test_a_step_made_again_after_a_resume_replaces_itself_and_what_followed() -> None:
    history = History([step(n, 0.1 * n) for n in range(1, 9)] + [evaluated(0, a=0.0), evaluated(6, a=0.6)])
    history.add(step(6, 0.9))
    assert history.train_reward()[-2:] == [(5, 0.5), (6, 0.9)]
    assert history.held_out() == [(0, 0.0)]


FIRST_LINEAGE = of(0, *(trained(n, 1.0) for n in range(1, 9)), *(evaluated(n, a=0.1 * n) for n in (0, 2, 4, 6)))


def test_a_version_that_is_evaluated_again_before_its_step_is_recorded_again_keeps_that_evaluation() -> None:
    history = History([*FIRST_LINEAGE, *of(1, evaluated(4, a=0.9), trained(4, 1.0))])
    assert history.held_out() == [(0, 0.0), (2, 0.2), (4, 0.9)]


def test_an_evaluation_that_outlives_its_lineage_counts_up_to_where_the_next_one_began() -> None:
    history = History([*FIRST_LINEAGE, *of(1, trained(4, 1.0)), *of(0, evaluated(8, a=0.8), evaluated(3, a=0.3))])
    assert history.held_out() == [(0, 0.0), (2, 0.2), (3, 0.3)]
    assert history.incarnation == 1


def test_a_second_record_of_the_newest_step_adds_to_it() -> None:
    history = History([step(1, 0.5), {"step": 1, "time": 2.0, "process": "orchestrator", "progress/rollouts": 9}])
    assert history.train_reward() == [(1, 0.5)]
    assert history.latest["progress/rollouts"] == 9


def test_held_out_reward_is_the_mean_over_environments_and_keeps_what_is_measured_less_often() -> None:
    history = History([evaluated(0, a=0.2, b=0.4), evaluated(10, a=0.6), evaluated(20, a=0.8, b=0.6)])
    assert history.held_out() == [(0, pytest.approx(0.3)), (10, pytest.approx(0.5)), (20, pytest.approx(0.7))]


def test_the_score_of_one_agent_is_not_the_score_of_an_environment() -> None:
    history = History([evaluated(0, poker=0.5, **{"poker/first": 1.0, "poker/second": 0.0})])
    assert history.held_out() == [(0, 0.5)]


def test_steps_and_evaluations_are_movement_and_gauges_are_not() -> None:
    history = History([step(1, 0.5), trained(1, 0.1), evaluated(1, a=0.2)])
    history.add({"step": 1, "time": 3.0, "process": "orchestrator", "dispatcher/inflight_train": 8})
    assert history.moves == 3


def test_the_step_is_what_the_trainer_has_done_however_far_batches_are_ahead() -> None:
    history = History([step(1, 0.5), step(2, 0.5)])
    assert history.step == 0
    history.add(trained(1, 0.1))
    assert history.step == 1
