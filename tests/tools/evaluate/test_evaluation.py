"""Models evaluated from end to end: episodes against an engine on a real socket, files, and what a kill leaves."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.environments.base import Context, Environment
from headrace.environments.chat import Chat
from headrace.environments.hackable import registry
from headrace.environments.hackable.registry import TrainingSample
from headrace.environments.registry import load_environment
from headrace.environments.workers import WorkerPool
from headrace.errors import BadInput
from headrace.orchestrator import shutdown
from headrace.rollout.types import Rollout, Task
from headrace.rollout.version import Version
from headrace.tools.evaluate.candidates import Candidate
from headrace.tools.evaluate.episodes import Evaluation
from headrace.tools.evaluate.evaluation import EvaluationOutcome, evaluate, select_examples
from headrace.transport.endpoint import read_endpoints
from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.run_dir import RolloutKind, RunDir
from tests.orchestrator.stand_ins import StandInEngine

SHOWN: list[tuple[str, int, int]] = []


@contextmanager
def silent(name: str, done: int, total: int) -> Iterator[Callable[[], None]]:
    SHOWN.append((name, done, total))
    yield lambda: None


def asked(output: Path, model: Path, **changes: Any) -> Evaluation:
    given: dict[str, Any] = {
        "env": "reverse-text",
        "args": {},
        "samples": 2,
        "sampling": {"temperature": 1.0},
    } | changes
    return Evaluation(output, **given, num_examples=6, concurrency=8, tokenizer=str(model))


def at(run: RunDir) -> Candidate:
    (endpoint,) = read_endpoints(run.endpoints).values()
    return Candidate("served", "endpoint", endpoint.url)


async def test_what_a_kill_left_is_not_run_again_and_half_a_line_is(tiny_model: Path, tmp_path: Path):
    run, output = RunDir(tmp_path / "run"), tmp_path / "out"
    async with StandInEngine(tiny_model, run) as engine:
        (whole,) = await evaluate(asked(output, tiny_model), [at(run)], silent)
        assert engine.answered == 12
        assert (whole.result.examples, len(whole.scored), whole.result.errors) == (6, 12, {})
        path = output / "served" / "completions.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:8]) + lines[8][:40])  # killed while it wrote
        (again,) = await evaluate(asked(output, tiny_model), [at(run)], silent)
        assert engine.answered == 12 + 4
        assert SHOWN[-1] == ("served", 8, 12)
        assert path.read_bytes().splitlines(keepends=True)[:8] == lines[:8]
        assert {(episode.key, episode.sample) for episode in again.scored} == {
            (episode.key, episode.sample) for episode in whole.scored
        }
        await evaluate(asked(output, tiny_model), [at(run)], silent)
        assert engine.answered == 16  # all was there
        (more,) = await evaluate(asked(output, tiny_model, samples=3), [at(run)], silent)
        assert (engine.answered, more.result.samples) == (22, 3)


async def test_rollouts_are_saved_as_those_of_a_run_and_added_to_when_the_evaluation_goes_on(
    tiny_model: Path, tmp_path: Path
):
    run, output = RunDir(tmp_path / "run"), tmp_path / "out"
    async with StandInEngine(tiny_model, run):
        await evaluate(asked(output, tiny_model), [at(run)], silent)
        (outcome,) = await evaluate(asked(output, tiny_model, samples=3), [at(run)], silent)
    files = RolloutFiles(output / "served" / "rollouts", RolloutKind.EVAL)
    assert files.steps() == [0]
    rows = files.columns(0, ["task_key", "episode", "reward", "completion_tokens"])
    assert len(rows) == 18
    expected = {(each.key, each.sample): (each.reward, each.tokens) for each in outcome.scored}
    assert {(row["task_key"], row["episode"]): (row["reward"], row["completion_tokens"]) for row in rows} == expected
    assert all(saved.rollout.samples for saved in files.read(0))


async def test_an_episode_is_right_where_the_engine_was(tiny_model: Path, tmp_path: Path):
    run = RunDir(tmp_path / "run")
    async with StandInEngine(tiny_model, run):
        (outcome,) = await evaluate(asked(tmp_path / "out", tiny_model), [at(run)], silent)
    right = sum(episode.correct for episode in outcome.scored)
    assert 0 < right < 12  # the stand-in reverses three of ten
    assert all(episode.correct == (episode.reward == 1.0) for episode in outcome.scored)
    assert outcome.result.estimates["tokens"].value > 1


async def test_episodes_of_other_settings_are_not_mixed_with_these(tiny_model: Path, tmp_path: Path):
    run, output = RunDir(tmp_path / "run"), tmp_path / "out"
    async with StandInEngine(tiny_model, run) as engine:
        await evaluate(asked(output, tiny_model), [at(run)], silent)
        warmer = asked(output, tiny_model, sampling={"temperature": 0.7})
        with pytest.raises(BadInput) as error:
            await evaluate(warmer, [at(run)], silent)
        assert (error.value.key, error.value.value) == ("sampling", {"temperature": 0.7})
        assert error.value.file == output / "served"
        assert engine.answered == 12


async def test_a_server_with_other_weights_does_not_go_on_and_one_that_is_gone_is_no_reason(
    tiny_model: Path, tmp_path: Path
):
    run, output = RunDir(tmp_path / "run"), tmp_path / "out"
    async with StandInEngine(tiny_model, run) as engine:
        served = at(run)
        (whole,) = await evaluate(asked(output, tiny_model), [served], silent)
        engine.version = Version(0, 4)
        with pytest.raises(BadInput) as error:
            await evaluate(asked(output, tiny_model), [served], silent)
        assert (error.value.key, error.value.value) == ("weights", ["stand-in 0-4"])
    (again,) = await evaluate(asked(output, tiny_model), [served], silent)
    assert again.result == whole.result


async def test_a_model_that_cannot_be_evaluated_is_named_and_the_others_go_on(tiny_model: Path, tmp_path: Path):
    run, unfinished = RunDir(tmp_path / "run"), tmp_path / "unfinished"
    async with StandInEngine(tiny_model, run) as engine:
        first = Candidate("unfinished", "model", str(unfinished / "model"), unfinished)
        bad, good = await evaluate(asked(tmp_path / "out", tiny_model), [first, at(run)], silent)
        assert isinstance(bad.error, BadInput) and bad.result.failure == str(bad.error)
        assert (bad.error.key, bad.error.value) == ("CHECKPOINT", str(unfinished))
        assert good.result.examples == 6
        engine.broken = True
        (broken,) = await evaluate(asked(tmp_path / "other", tiny_model), [at(run)], silent)
        assert broken.result.failure == "every episode failed: 12 engine"
        engine.broken = False
        (whole,) = await evaluate(asked(tmp_path / "other", tiny_model), [at(run)], silent)  # they are tried again
        assert not whole.result.failure and not whole.result.errors


@pytest.mark.parametrize(
    ("env", "args", "pairs"),
    [
        ("reverse-text", {}, [("<think>", "</think>")]),
        ("strict-math", {"data": "arithmetic", "opening": "[r]", "closing": "[/r]"}, [("[r]", "[/r]")]),
        ("hackable", {"provider": f"{__name__}:tagged"}, [("<think>", "</think>"), ("[r]", "[/r]")]),
    ],
)
def test_the_tags_of_thoughts_are_those_of_the_environment_or_of_its_tasks(
    env: str, args: dict[str, Any], pairs: list[tuple[str, str]], tmp_path: Path
):
    evaluation = asked(tmp_path, tmp_path, env=env, args=args)
    environment = load_environment(env, args)
    assert select_examples(environment, evaluation).pairs == pairs
    pool = WorkerPool(environment, env, args, size=1)
    assert select_examples(pool, evaluation).pairs == pairs
    assert select_examples(environment, evaluation._replace(tags=("<a>", "</a>"))).pairs == [("<a>", "</a>")]


def tagged(**kwargs: Any) -> list[TrainingSample]:
    return [registry.make_sample(f"{n} + 1?", str(n + 1), {}, tags=["[r]", "[/r]"] if n else None) for n in (0, 1, 2)]


class MissingTag(Environment):
    def tasks(self) -> list[dict[str, Any]]:
        return [{"word": "river"}]

    def thinking_tags(self, task: Task) -> tuple[str, str]:
        return "<think>", ""


def test_tags_that_an_environment_gives_must_be_two_texts(tmp_path: Path):
    with pytest.raises(BadInput) as error:
        select_examples(MissingTag(), asked(tmp_path, tmp_path))
    assert (error.value.key, error.value.value) == ("MissingTag.thinking_tags", ("<think>", ""))


async def test_servers_are_asked_at_once_and_a_failure_of_any_kind_costs_one_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    open_at_once: list[set[str]] = []
    shown: set[str] = set()

    @contextmanager
    def show(name: str, done: int, total: int) -> Iterator[Callable[[], None]]:
        shown.add(name)
        if name == "fails":
            raise RuntimeError("the disk is gone")
        yield lambda: open_at_once.append(set(shown))
        shown.remove(name)

    first, second = RunDir(tmp_path / "first"), RunDir(tmp_path / "second")
    async with StandInEngine(tiny_model, first), StandInEngine(tiny_model, second):
        candidates = [at(first)._replace(name="one"), at(first)._replace(name="fails"), at(second)._replace(name="two")]
        one, failed, two = await evaluate(asked(tmp_path / "out", tiny_model), candidates, show)
    assert any({"one", "two"} <= names for names in open_at_once)
    assert isinstance(failed.error, RuntimeError) and "the disk is gone" in failed.result.failure
    assert (one.result.examples, two.result.examples) == (6, 6)
    assert set(one.result.estimates) == set(two.result.estimates)


class HangsAtTheEnd(Environment):
    """Its close() swallows every cancellation."""

    def tasks(self) -> list[dict[str, Any]]:
        return [{"word": "river"}]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        chat = Chat(context, task.data["word"])
        await chat.reply()
        return [chat.rollout({"correct": 1.0})]

    async def close(self) -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


def test_an_environment_that_does_not_close_is_left_behind(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name in ("CLOSE_WARNING_S", "CLOSE_TIMEOUT_S", "CANCEL_GRACE_S"):
        monkeypatch.setattr(shutdown, name, 0.02)
    run = RunDir(tmp_path / "run")

    async def work() -> list[EvaluationOutcome]:
        async with StandInEngine(tiny_model, run):
            hanging = asked(tmp_path / "out", tiny_model, env=f"{__name__}:HangsAtTheEnd", samples=1)
            return await evaluate(hanging, [at(run)], silent)

    (outcome,) = shutdown.run_loop(work())
    assert outcome.result.examples == 1
    assert any("HangsAtTheEnd" in message for message in caplog.messages)


class Duel(Environment):
    """The longest answer of a group is right; one that ends before its group cannot know."""

    def tasks(self) -> list[dict[str, Any]]:
        return [{"word": word} for word in ("river", "mill")]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        chat = Chat(context, task.data["word"])
        await chat.reply()
        return [chat.rollout({})]

    async def score_group(self, rollouts: list[Rollout]) -> None:
        assert len(rollouts) == 2
        for number, rollout in enumerate(rollouts):
            rollout.rewards = {"correct": float(number == 0)}


async def test_a_group_that_is_scored_together_is_run_again_together(tiny_model: Path, tmp_path: Path):
    run, output = RunDir(tmp_path / "run"), tmp_path / "out"
    async with StandInEngine(tiny_model, run) as engine:
        duel = asked(output, tiny_model, env=f"{Duel.__module__}:Duel")
        (outcome,) = await evaluate(duel, [at(run)], silent)
        assert outcome.result.estimates["pass@1"].value == 0.5
        path = output / "served" / "completions.jsonl"
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
        await evaluate(duel, [at(run)], silent)
        assert engine.answered == 4 + 2
