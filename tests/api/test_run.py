"""The Python interface on a recorded run, and on real ones that it starts, stops and resumes."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.api.run import RunFailed
from headrace.config.base import ConfigError
from headrace.errors import BadInput
from tests.end_to_end.runs import is_alive, processes_of, write_run_file
from tests.end_to_end.test_recorded_runs import copy_recorded_runs


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> headrace.Run:
    return headrace.Run(copy_recorded_runs(tmp_path_factory.mktemp("api") / "recorded") / "rl")


def test_metrics_have_a_row_per_step_and_a_column_per_name(recorded: headrace.Run):
    table = recorded.metrics("loss", "reward/all/mean")
    assert table.column_names == ["step", "loss", "reward/all/mean"]
    assert table["step"].to_pylist() == list(range(1, recorded.summary().steps + 1))
    assert all(isinstance(value, float) for value in table["loss"].to_pylist())
    assert recorded.metrics().column_names[0] == "step"
    with pytest.raises(BadInput) as error:
        recorded.metrics("reward/all/meen")
    assert error.value.value == "reward/all/meen"
    assert "reward/all/mean" in str(error.value)


def test_rollouts_checkpoints_evaluations_and_settings_are_read(recorded: headrace.Run):
    rollouts = recorded.rollouts()
    assert rollouts.num_rows > 0
    assert {"reward", "task_key", "messages", "drop_reason"} <= set(rollouts.column_names)
    assert recorded.checkpoints()
    assert all(path.is_dir() for path in recorded.checkpoints().values())
    assert recorded.evaluations().column_names == ["environment", "step", "score", "failed"]
    assert recorded.config.max_steps is not None
    with pytest.raises(BadInput):
        recorded.rollouts(10_000)


async def test_a_run_is_audited_where_an_event_loop_is_running_as_in_a_notebook(recorded: headrace.Run):
    assert recorded.audit().problems == []


def test_a_plot_is_shown_by_notebooks_and_saved(recorded: headrace.Run, tmp_path: Path):
    plot = recorded.plot("loss")
    assert plot._repr_svg_().startswith("<svg")
    plot.save(tmp_path / "loss.svg")
    assert (tmp_path / "loss.svg").read_text() == str(plot)


def test_a_run_that_is_over_ends_its_events_and_cannot_be_stopped(recorded: headrace.Run):
    events = list(recorded.events())
    assert all("reward/all/mean" in event.values for event in events if event.kind == "batch")
    assert [event.step for event in events if event.kind == "step"] == recorded.metrics("loss")["step"].to_pylist()
    with pytest.raises(BadInput):
        recorded.stop()


def test_invalid_settings_are_refused_before_anything_is_started(tmp_path: Path, tiny_model: Path):
    file = write_run_file(tmp_path, tiny_model)
    with pytest.raises(ConfigError):
        headrace.start(file, {"trainer.optim.lr": "fast"})
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[headrace.Run, list[Any]]:
    """A run of an earlier version, resumed, stopped after a step and resumed to its end; with the events of both."""
    file = copy_recorded_runs(tmp_path_factory.mktemp("started") / "recorded") / "rl" / "config.toml"
    seen: list[Any] = []

    async def train_and_stop() -> None:
        started = headrace.start(file, {"max_steps": 40}, resume=True)
        processes: dict[str, int] = {}
        async for event in started.events():
            seen.append(event)
            if event.kind == "step" and event.step == 5:
                processes = processes_of(started.path)
                started.stop()
        await started.finished()
        assert started.state == "stopped"
        assert "--resume" in started.output
        assert "Traceback" not in started.output
        assert processes.keys() == {"inference", "trainer", "orchestrator"}
        assert not any(map(is_alive, processes.values()))

    asyncio.run(train_and_stop())
    done = max(event.step for event in seen if event.kind == "step")
    return headrace.run(file, {"max_steps": done + 2}, resume=True, on_event=seen.append), seen


def test_a_run_is_resumed_followed_stopped_and_resumed(trained: tuple[headrace.Run, list[Any]]):
    run, seen = trained
    steps = run.metrics("loss")["step"].to_pylist()
    assert run.state == "finished"
    assert steps == list(range(1, len(steps) + 1))
    assert {event.step for event in seen if event.kind == "step"} == set(steps)
    assert run.audit().problems == []
    assert run.verify().damages == []
    assert (run.model / "config.json").is_file()


def test_samples_are_scored_as_they_were_sampled(trained: tuple[headrace.Run, list[Any]]):
    run, _ = trained
    prompts = ["abc", [{"role": "user", "content": "abc"}]]
    with headrace.Model(run) as model:
        found = model.sample(prompts, n=2, max_tokens=6, seed=1)
        scores = model.score([prompts[0], prompts[1]], [found[0][0].token_ids, found[1][1].token_ids])
    assert [len(each) for each in found] == [2, 2]
    assert all(1 <= len(one.token_ids) <= 6 for each in found for one in each)
    # Prefill and decode sum in different orders: float32 rounding of logits of order 10.
    np.testing.assert_allclose(scores[0], found[0][0].logprobs, atol=1e-4)
    np.testing.assert_allclose(scores[1], found[1][1].logprobs, atol=1e-4)


@pytest.mark.full
def test_a_run_is_evaluated_on_its_own_environment(trained: tuple[headrace.Run, list[Any]], tmp_path: Path):
    run, _ = trained
    (result,) = headrace.evaluate(run, output=tmp_path / "eval", num_examples=2, max_tokens=4)
    assert result.failure == ""
    assert result.run == str(run.path)


def test_a_run_that_fails_raises_with_the_end_of_its_output(tmp_path: Path, tiny_model: Path):
    file = write_run_file(tmp_path, tiny_model)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("not a run")
    with pytest.raises((BadInput, RunFailed)) as error:
        headrace.run(file)
    assert "output_dir" in str(error.value)
