"""Environments in worker processes: real processes that work, fail, hang and die."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.environments.base import Environment, EpisodeError, PromptTooLong
from headrace.environments.channel import encode, make_decoder
from headrace.environments.workers import WorkerPool, WorkersFailed
from headrace.rollout.checks import check_rollout
from headrace.rollout.types import Rollout, Sample, Turn
from tests.environments.pools import Broken, Echo, Failing, Silent, pool, task
from tests.environments.worker_environments import NAME, ODD, Deeds, Ranks

ROOT = Path(__file__).parents[2]
OTHERS = NAME.partition(":")[0]


async def pid_of(workers: WorkerPool) -> int:
    """The process that takes the next episode."""
    [rollout] = await workers.run(task("nothing"), Echo())
    return int(rollout.metrics["pid"])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def wait_for_lock(path: Path) -> None:
    """Until no process holds it."""
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)


async def test_results_are_those_of_the_same_environment_in_this_process():
    async with pool(2) as workers:
        there = await asyncio.gather(*(workers.run(task("answer", turns=n), Echo()) for n in range(1, 9)))
    here = [await Deeds().run(task("answer", turns=n), Echo()) for n in range(1, 9)]
    assert encode(there) == encode(here)
    assert there[0][0].turns[0].finish_reason == "stop"


async def test_calls_that_an_episode_makes_at_once_get_each_its_answer():
    async with pool() as workers:
        [rollout] = await workers.run(task("ask_at_once"), Echo())
    assert [message["content"] for message in rollout.messages] == [f"echo {n}" for n in range(5)]


async def test_tasks_and_group_scoring_are_those_of_the_environment():
    plain = WorkerPool(Deeds(), NAME, {}, size=1)
    assert plain.tasks() == Deeds().tasks()
    assert not plain.scores_groups
    assert WorkerPool(Ranks(), f"{OTHERS}:Ranks", {}, size=1).scores_groups


def test_an_environment_scores_groups_exactly_if_it_says_how():
    assert not Environment().scores_groups
    assert not Deeds().scores_groups
    assert Ranks().scores_groups


async def test_an_environment_that_computes_leaves_the_event_loop_here_free(tmp_path: Path):
    started, stop = tmp_path / "started", tmp_path / "stop"
    async with pool() as workers:
        episode = asyncio.create_task(workers.run(task("spin_until", started=str(started), path=str(stop)), Echo()))
        await until(started.exists)
        for _ in range(1000):
            await asyncio.sleep(0)
            assert not episode.done()
        stop.touch()
        assert await episode


async def test_episodes_go_to_the_worker_with_the_fewest(tmp_path: Path):
    started, stop = tmp_path / "started", tmp_path / "stop"
    async with pool(2) as workers:
        busy = asyncio.create_task(workers.run(task("spin_until", started=str(started), path=str(stop)), Echo()))
        await until(started.exists)
        others = [await pid_of(workers) for _ in range(3)]
        stop.touch()
        [rollout] = await busy
    assert len(set(others)) == 1
    assert rollout.metrics["pid"] not in others


async def test_numpy_values_travel():
    async with pool() as workers:
        [rollout] = await workers.run(task("return_numpy"), Echo())
    assert rollout.rewards == {"mean": 0.5}
    assert rollout.metrics == {"n": 3}
    assert rollout.samples[0].streams["mine"].tolist() == [0]


def test_a_sample_survives_the_channel():
    sample = Sample(np.arange(4), np.array([0, 0, 1, 1]), np.full(4, -0.1), np.full(4, 3), 2, 0.9, [(1, 2, 3, 4)])
    sample.set_stream("advantages", [0, 0, 0.5, 0.5])
    sample.streams["mine"] = np.arange(4, dtype=np.int64)
    [read] = make_decoder(list[Rollout]).decode(encode([Rollout(samples=[sample])]))[0].samples
    assert encode(read) == encode(sample)
    assert (read.mask.dtype, read.streams["mine"].dtype) == (np.bool_, np.int64)
    read.logprobs[0] = 0.0  # what has been read can be written to


@pytest.mark.parametrize("truncated", [None, [-0.25, 0.0]])
def test_a_turn_survives_the_channel(truncated: list[float] | None):
    turn = Turn([1], [2, 3], [-0.5, -0.1], [4, 5], 0.9, truncated_logprobs=truncated)
    [read] = make_decoder(list[Rollout]).decode(encode([Rollout(turns=[turn])]))[0].turns
    assert encode(read) == encode(turn)
    assert (read.truncated_logprobs is None) == (truncated is None)


async def test_an_exception_says_what_it_was_and_where():
    async with pool() as workers:
        with pytest.raises(EpisodeError, match=r"^KeyError: 'no such column'$") as failure:
            await workers.run(task("look_up"), Echo())
        assert failure.value.reason == "environment"
        assert failure.value.place.startswith("KeyError ")
        assert "worker_environments.py:" in failure.value.place
        assert '{}["no such column"]' in failure.value.remote_traceback
        assert await pid_of(workers)


@pytest.mark.parametrize(
    ("deed", "reason", "words"),
    [
        ("mumble", "environment", r"ValueError: a lone surrogate: \\ud800"),
        ("leave", "environment", "SystemExit: a checker that wants to end the program"),
        ("explain", "sandbox", "no sandbox is free"),
        ("cancel_itself", "environment", "cancelled"),
        ("return_text", "environment", r"`str` - at `\$\[0\]"),
        ("return_instead", "environment", r"run\(\).*Rollout"),
        ("give_odd_reason", "404", "not found"),
        ("give_unprintable_reason", r"half \ud800", "a reason"),
        ("give_reason_without_text", "environment", "RuntimeError: says nothing"),
        ("be_unspeakable", "environment", "Unspeakable: <exception str"),
    ],
)
async def test_whatever_an_episode_does_costs_that_episode_alone(deed: str, reason: str, words: str):
    async with pool() as workers:
        before = await pid_of(workers)
        with pytest.raises(EpisodeError, match=words) as failure:
            await workers.run(task(deed), Echo())
        assert failure.value.reason == reason
        assert await pid_of(workers) == before


async def test_a_failed_chat_that_the_environment_lets_through_is_raised_as_it_was():
    model = Failing()
    async with pool() as workers:
        with pytest.raises(Broken) as failure:
            await workers.run(task("answer"), model)
    assert failure.value is model.error


async def test_a_failed_chat_can_be_caught_by_the_environment():
    async with pool() as workers:
        [rollout] = await workers.run(task("catch"), Failing())
    assert rollout.stop_reason == "Broken | Broken: the engine is gone"


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (PromptTooLong("9 tokens"), "PromptTooLong prompt_too_long: 9 tokens"),
        (EpisodeError("quota", "all used up"), "EpisodeError quota: all used up"),
    ],
)
async def test_a_failed_chat_is_the_same_episode_error_in_a_worker_as_here(error: EpisodeError, seen: str):
    model = Failing()
    model.error = error
    async with pool() as workers:
        for environment in (workers, Deeds()):
            [rollout] = await environment.run(task("catch_episode_error"), model)
            assert rollout.stop_reason == seen
        with pytest.raises(EpisodeError) as failure:
            await workers.run(task("answer"), model)
    assert failure.value is error


async def test_what_an_environment_returns_is_the_same_from_a_worker_as_from_here():
    deeds = [task("return_with", field=field, which=n) for field, odd in ODD.items() for n in range(len(odd))]
    async with pool() as workers:
        for deed in deeds:
            [there], [here] = await workers.run(deed, Echo()), await Deeds().run(deed, Echo())
            for rollout in (there, here):
                check_rollout(rollout, scored_later=False)
            assert encode(there) == encode(here), deed.data


async def test_a_call_that_the_environment_gives_up_is_cancelled_here(tmp_path: Path):
    model, go_on = Silent(), tmp_path / "go on"
    async with pool() as workers:
        episode = asyncio.create_task(workers.run(task("give_up_waiting", path=str(go_on)), model))
        await model.hung_up.wait()
        go_on.touch()
        assert await episode


async def test_a_call_after_the_end_of_its_episode_is_harmless():
    async with pool() as workers:
        await workers.run(task("chat_afterwards"), Echo())
        before = await pid_of(workers)
        assert await pid_of(workers) == before


async def test_a_cancelled_episode_is_cancelled_there_and_its_call_here(tmp_path: Path):
    started, cancelled = tmp_path / "started", tmp_path / "cancelled"
    model = Silent()
    async with pool() as workers:
        before = await pid_of(workers)
        talking = asyncio.create_task(workers.run(task("answer"), model))
        sleeping = asyncio.create_task(
            workers.run(task("sleep_for_ever", started=str(started), cancelled=str(cancelled)), Echo())
        )
        await model.asked.wait()
        await until(started.exists)
        for episode in (talking, sleeping):
            episode.cancel()
            with pytest.raises(asyncio.CancelledError):
                await episode
        await model.hung_up.wait()
        await until(cancelled.exists)
        assert await pid_of(workers) == before


async def test_an_episode_cancelled_before_its_first_step_is_acknowledged():
    async with pool(2) as workers:
        first = await pid_of(workers)
        episode = asyncio.create_task(workers.run(task("answer"), Silent()))
        await asyncio.sleep(0)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        while await pid_of(workers) != first:  # the second is chosen as long as the first has something to do
            await asyncio.sleep(0.01)


async def test_an_episode_stuck_in_synchronous_code_is_ended_by_killing_its_worker(tmp_path: Path):
    started, never = tmp_path / "started", str(tmp_path / "never")
    model = Silent()
    async with pool(grace=0.2) as workers:
        before = await pid_of(workers)
        other = asyncio.create_task(workers.run(task("answer"), model))
        await model.asked.wait()
        stuck = asyncio.create_task(workers.run(task("spin_until", started=str(started), path=never), Echo()))
        await until(started.exists)
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        with pytest.raises(EpisodeError, match=r"0\.2 s") as failure:
            await other
        assert failure.value.reason == "worker"
        assert await pid_of(workers) != before
        with pytest.raises(ProcessLookupError):
            os.kill(before, 0)


async def test_a_killed_worker_costs_its_episodes_and_the_pool_goes_on(caplog: pytest.LogCaptureFixture):
    models = [Silent(), Silent()]
    async with pool(2) as workers:
        episodes = [asyncio.create_task(workers.run(task("answer"), model)) for model in models]
        for model in models:
            await model.asked.wait()
        victim = await pid_of(workers)  # both have one episode, so this is the worker of the first
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(EpisodeError, match="SIGKILL") as failure:
            await episodes[0]
        assert failure.value.reason == "worker"
        await models[0].hung_up.wait()
        assert not episodes[1].done()
        assert victim not in {await pid_of(workers) for _ in range(4)}
        episodes[1].cancel()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"a worker of {NAME} was ended by SIGKILL; 1 episodes failed with it"
    ]


@pytest.mark.parametrize(("deed", "words"), [("exit_at_once", "status 3"), ("read_nowhere", "SIGSEGV")])
async def test_a_worker_that_dies_says_how(deed: str, words: str):
    async with pool() as workers:
        with pytest.raises(EpisodeError, match=words) as failure:
            await workers.run(task(deed), Echo())
        assert failure.value.reason == "worker"
        assert await pid_of(workers)


async def test_ctrl_c_does_not_reach_a_worker():
    async with pool() as workers:
        before = await pid_of(workers)
        os.kill(before, signal.SIGINT)
        assert {await pid_of(workers) for _ in range(20)} == {before}


async def test_what_an_environment_prints_is_harmless(capfd: pytest.CaptureFixture[str]):
    async with pool() as workers:
        await asyncio.gather(*(workers.run(task("print_much"), Echo()) for _ in range(3)))
    assert capfd.readouterr().out.count("noise") == 60_000


async def test_a_worker_is_replaced_after_so_many_episodes():
    async with pool(recycle_after=2) as workers:
        pids = [await pid_of(workers) for _ in range(6)]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4] == pids[5]


async def test_a_replaced_worker_finishes_its_episodes_and_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    started, stop = tmp_path / "started", tmp_path / "stop"
    async with pool(recycle_after=1) as workers:
        episode = asyncio.create_task(workers.run(task("spin_until", started=str(started), path=str(stop)), Echo()))
        await until(started.exists)
        other = await pid_of(workers)
        stop.touch()
        [rollout] = await episode
    assert rollout.metrics["pid"] != other
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the system does not tell a process's memory")
async def test_a_worker_that_has_grown_too_big_is_replaced():
    async with pool(max_memory_mb=200) as workers:
        small = await pid_of(workers)
        assert await pid_of(workers) == small
        [rollout] = await workers.run(task("grow"), Echo())
        assert rollout.metrics["pid"] == small
        assert await pid_of(workers) != small


async def test_a_group_is_scored_in_a_worker_and_its_rewards_arrive_here():
    async with pool(identifier=f"{OTHERS}:Ranks") as workers:
        answers = await asyncio.gather(*(workers.run(task("answer", turns=1), Echo()) for _ in range(2)))
        group = [rollout for rollouts in answers for rollout in rollouts]
        group.append(Rollout(turns=[Turn([1], [5, 6, 7], [0.0] * 3, [0] * 3, 1.0)], metrics={"kept": 1.0}))
        await workers.score_group(group)
    assert [rollout.rewards for rollout in group] == [{"share": 1.0}, {"share": 1.0}, {"share": 0.5}]
    assert group[2].metrics["kept"] == 1.0
    assert group[2].metrics["judge"] != os.getpid()


async def test_a_group_that_cannot_be_scored_is_left_as_it_was():
    group = [Rollout(rewards={"before": 1.0})]
    async with pool(identifier=f"{OTHERS}:Ranks") as workers:
        with pytest.raises(EpisodeError, match="RuntimeError: nothing to judge"):
            await workers.score_group(group)
    assert group[0].rewards == {"before": 1.0}


async def test_an_environment_that_does_not_load_in_a_worker_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    args = {"home": os.getpid(), "broken": str(tmp_path)}
    with pytest.raises(WorkersFailed, match=r":HereOnly'.*RuntimeError: the data set is not"):
        async with pool(2, f"{OTHERS}:HereOnly", args):
            pass
    assert caplog.text.count("Traceback") == 1


async def test_an_environment_that_fails_to_start_in_a_worker_is_closed_there(tmp_path: Path):
    opened, closed = tmp_path / "opened", tmp_path / "closed"
    args = {"home": os.getpid(), "opened": str(opened), "closed": str(closed), "fails": True}
    with pytest.raises(WorkersFailed, match="RuntimeError: half open"):
        async with pool(1, f"{OTHERS}:HalfOpen", args):
            pass
    assert closed.exists()


async def test_a_pool_closed_while_a_worker_starts_closes_the_environment_there_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    opened, closed = tmp_path / "opened", tmp_path / "closed"
    args = {"home": os.getpid(), "opened": str(opened), "closed": str(closed), "fails": False}
    workers = WorkerPool(Deeds(), f"{OTHERS}:HalfOpen", args, size=1)
    starting = asyncio.create_task(workers.start())
    await until(opened.exists)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert closed.exists()
    assert capfd.readouterr().err == ""


async def test_an_environment_that_takes_too_long_to_load_is_named():
    with pytest.raises(WorkersFailed, match=r"0\.5 s"):
        async with pool(1, f"{OTHERS}:Slow", {"home": os.getpid()}, start_timeout=0.5):
            pass


async def test_episodes_fail_with_the_cause_when_no_worker_starts_any_more(tmp_path: Path):
    broken = tmp_path / "broken"
    async with pool(1, f"{OTHERS}:HereOnly", {"home": os.getpid(), "broken": str(broken)}) as workers:
        last = await pid_of(workers)
        broken.touch()
        os.kill(last, signal.SIGKILL)
        with pytest.raises(EpisodeError, match="SIGKILL"):
            await workers.run(task("nothing"), Echo())
        with pytest.raises(EpisodeError, match=r"\b3\b.*the data set is not mounted") as failure:
            await workers.run(task("nothing"), Echo())
        assert failure.value.reason == "worker"
        broken.unlink()
        assert await pid_of(workers) != last


async def test_closing_ends_a_worker_that_is_stuck_with_all_it_has_started(tmp_path: Path):
    lock, started = tmp_path / "lock", tmp_path / "started"
    lock.touch()
    async with pool(grace=0.2) as workers:
        await workers.run(task("start_process", lock=str(lock)), Echo())
        deed = task("spin_until", started=str(started), path=str(tmp_path / "never"))
        episode = asyncio.create_task(workers.run(deed, Echo()))
        await until(started.exists)
    with pytest.raises(EpisodeError, match=r"0\.2 s"):
        await episode
    wait_for_lock(lock)


async def test_a_pool_that_does_not_run_says_so():
    with pytest.raises(RuntimeError, match=r"start\(\)"):
        await WorkerPool(Deeds(), NAME, {}, size=1).run(task("answer"), Echo())


PARENT = """
import asyncio, sys
from tests.environments import pools as t
async def main():
    async with t.pool() as workers:
        await workers.run(t.task("backtrack_for_ever", lock=sys.argv[1]), t.Echo())
asyncio.run(main())
"""


def test_a_worker_ends_with_its_parent_even_in_code_that_lets_nothing_else_run(tmp_path: Path):
    lock = tmp_path / "lock"
    lock.touch()
    command = [sys.executable, "-c", PARENT, str(lock)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "locked\n"
        parent.kill()
    wait_for_lock(lock)


def test_a_worker_starts_without_what_only_its_parent_needs():
    code = "import sys, headrace.environments.worker; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "aiohttp", "renderers", "tokenizers", "jinja2", "pydantic", "pyarrow"}
    assert heavy.isdisjoint(done.stdout.split())
