"""The whole orchestrator between a stand-in engine (real sockets) and a stand-in trainer (real files)."""

import asyncio
import errno
import math
import os
import random
import signal
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from headrace.environments.base import Environment
from headrace.environments.shipped.reverse_text import ReverseText
from headrace.errors import BadInput, Failure
from headrace.observe.metrics import MetricsLog, read_metrics
from headrace.observe.status import Status
from headrace.orchestrator import main
from headrace.orchestrator.audit import find_violations
from headrace.orchestrator.empty_batches import RunFailed
from headrace.rollout.batch import Batch
from headrace.rollout.types import Rollout
from headrace.rollout.version import Version, staleness
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from headrace.transport.batches import BatchStore
from headrace.transport.epochs import hold_epoch
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import FileRecord
from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.run_dir import RolloutKind, RunDir
from tests.observe.metrics_page import undocumented
from tests.orchestrator.stand_ins import StandInEngine, StandInTrainer
from tests.refusals import refused

STEPS = 4
TIMES = {
    f"time/{name}" for name in ("batch", "wait_for_rollouts", "tail", "wait_for_weights", "scoring", "write_batch")
}


class Broken(Environment):
    """An environment with a bug."""

    def tasks(self):
        return [{"n": n} for n in range(8)]

    async def run(self, task, context):
        raise KeyError("no such column: question")


class Mischief(ReverseText):
    """Every second episode goes wrong, each in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes = 0

    async def run(self, task, context):
        self.episodes += 1
        match self.episodes % 12:
            case 1:
                raise KeyError("no such column: question")
            case 3:
                await asyncio.sleep(3600)
            case 5:
                return []
            case 7:
                return [Rollout(rewards={"similarity": 1.0})]
            case 9:
                (rollout,) = await super().run(task, context)
                rollout.rewards = {"similarity": math.nan}
                return [rollout]
            case 11:
                (rollout,) = await super().run(task, context)
                rollout.rewards = {}
                return [rollout]
        return await super().run(task, context)


class Careless(ReverseText):
    """Returns what cannot be recorded, or tries to leave."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes = 0

    async def run(self, task, context):
        self.episodes += 1
        number = self.episodes
        (rollout,) = await super().run(task, context)
        match number % 10:
            case 1:
                rollout.metrics = {"score": None}
            case 3:
                rollout.messages = [{"role": "user", "content": object()}]
            case 5:
                rollout.rewards = {"similarity": None}
            case 7:
                sys.exit()
            case 9:
                return rollout
        return [rollout]


class Forger(ReverseText):
    """Changes the tokens that were sampled, and returns the first rollout of all again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[Rollout] = []

    async def run(self, task, context):
        (rollout,) = await super().run(task, context)
        self.returned.append(rollout)
        match len(self.returned) % 4:
            case 2:
                rollout.turns[0].completion_ids[0] = 10**9
            case 3:
                return self.returned[:1]
        return [rollout]


class Unscorable(ReverseText):
    """A judge that is never there."""

    async def score_group(self, rollouts):
        raise ConnectionError("the judge is away")


class Tournament(ReverseText):
    """Answers are scored against each other; now and then one is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes = 0

    async def run(self, task, context):
        self.episodes += 1
        if self.episodes % 9 == 0:
            raise ConnectionError("the judge is away")
        (rollout,) = await super().run(task, context)
        rollout.rewards = {}
        return [rollout]

    async def score_group(self, rollouts):
        assert len(rollouts) == 4
        for place, rollout in enumerate(rollouts):
            rollout.rewards = {"place": float(place)}


def drop_short_answers(rollout: Rollout, shortest: int) -> bool:
    """A user's own filter."""
    return rollout.completion_tokens < shortest


class Pipeline:
    """A run directory with everything around the orchestrator ready to start."""

    def __init__(self, root: Path, model: Path, **orchestrator: Any) -> None:
        self.run = RunDir(root)
        settings: dict[str, Any] = {
            "batch_size": 16,
            "group_size": 4,
            "train": {"env": [{"id": "reverse-text"}]},
            "eval": {
                "interval": 2,
                "env": [{"id": "reverse-text", "name": "heldout", "args": {"split": "eval", "num_tasks": 8}}],
            },
            **orchestrator,
        }
        settings = {key: value for key, value in settings.items() if value is not None}
        tree = {
            "output_dir": str(root),
            "max_steps": STEPS,
            "seq_len": 64,
            "model": {"name": str(model)},
            "orchestrator": settings,
        }
        self.run_config = validate(RunConfig, tree, "test")[0]
        self.config = self.run_config.orchestrator
        self.engine = StandInEngine(model, self.run)
        self.trainer = StandInTrainer(self.run)

    async def finish(self, first: int = 1) -> None:
        """Run to the end."""
        status = Status(self.run.status, "orchestrator")
        try:
            async with self.engine:
                training = asyncio.create_task(self.trainer.train(first, STEPS))
                try:
                    await asyncio.wait_for(main._run(self.config, self.run, status), 60)
                finally:
                    training.cancel()
        finally:
            status.close("ended")

    def records(self, key: str) -> dict[int, float]:
        return {r["step"]: r[key] for r in read_metrics(self.run.metrics) if key in r}


async def test_a_run_ships_every_step_evaluates_on_time_and_accounts_for_every_draw(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model)
    await pipeline.finish()
    assert [batch.step for batch in pipeline.trainer.batches] == [1, 2, 3, 4]
    first, second, last = sorted(pipeline.records("eval/heldout/avg@1"))
    assert (first, last) == (0, STEPS)
    assert second in (2, 3)  # the stand-in trains in no time: version 2 may be passed over
    files = RolloutFiles(pipeline.run.rollouts, RolloutKind.EVAL)
    assert files.steps() == [first, second, last]
    played = [saved.rollout for saved in files.read(last)]
    assert len({rollout.task_key for rollout in played}) == len(played) == 8
    assert all(rollout.env == "heldout" and rollout.samples and rollout.messages for rollout in played)
    mean = sum(rollout.reward for rollout in played) / len(played)
    assert mean == pytest.approx(pipeline.records("eval/heldout/avg@1")[last])
    states = Journal(pipeline.run.journal).count_states()
    assert states.pop("drawn", 0) == 0
    assert states["shipped"] >= STEPS  # groups with a signal; the rest were dropped with a reason
    assert set(states) <= {"shipped", "dropped:zero_advantage", "dropped:max_steps"}
    assert undocumented(read_metrics(pipeline.run.metrics)) == []


async def test_batches_carry_credit_and_are_never_staler_than_the_bound(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model, max_off_policy_steps=1, max_async_level=1)
    await pipeline.finish()
    for batch in pipeline.trainer.batches:
        for entry in batch.samples:
            sample = entry.sample
            assert sample.streams["advantages"][sample.mask].any()
            assert staleness(batch.step, int(sample.versions[sample.mask].min())) <= 1


async def test_level_zero_trains_only_on_the_current_policy(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model, max_async_level=0)
    pipeline.engine.delay = 0.005
    await pipeline.finish()
    for batch in pipeline.trainer.batches:
        for entry in batch.samples:
            assert set(entry.sample.versions[entry.sample.mask]) == {batch.step - 1}


async def test_a_restarted_orchestrator_continues_and_ships_no_step_twice(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model)
    status = Status(pipeline.run.status, "orchestrator")
    async with pipeline.engine:
        running = asyncio.create_task(main._run(pipeline.config, pipeline.run, status))
        await pipeline.trainer.train(1, 2)
        running.cancel()  # no orderly end
        await asyncio.gather(running, return_exceptions=True)
    status.close("killed")
    done = Journal(pipeline.run.journal).last_step()
    assert done >= 2
    second = Pipeline(tmp_path, tiny_model)
    second.engine.version = pipeline.engine.version
    await second.finish(first=3)
    shipped = [*pipeline.trainer.batches, *second.trainer.batches]
    assert [batch.step for batch in shipped] == [1, 2, 3, 4]
    drawn = [draw for batch in shipped for draw in batch.draw_ids]
    assert len(drawn) == len(set(drawn))


async def test_a_batch_that_cannot_be_written_loses_no_draw(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    pipeline = Pipeline(tmp_path, tiny_model)
    prepare = BatchStore.prepare

    def full_disk_at_step_3(store: BatchStore, batch: Batch) -> FileRecord:
        if batch.step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return prepare(store, batch)

    monkeypatch.setattr(BatchStore, "prepare", full_disk_at_step_3)
    with pytest.raises(OSError, match="No space left"):
        await pipeline.finish()
    monkeypatch.undo()
    second = Pipeline(tmp_path, tiny_model)
    second.engine.version = pipeline.engine.version
    await second.finish(first=3)
    with sqlite3.connect(pipeline.run.journal) as journal:
        rows = journal.execute("SELECT id, state FROM draws ORDER BY id").fetchall()
    assert [draw for draw, _ in rows] == list(range(len(rows)))
    assert "drawn" not in {state for _, state in rows}
    shipped = [draw for b in (*pipeline.trainer.batches, *second.trainer.batches) for draw in b.draw_ids]
    assert len(shipped) == len(set(shipped))


async def test_a_journal_that_ends_before_an_announced_batch_has_lost_commits(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model)
    await pipeline.finish()
    with closing(Journal(pipeline.run.journal)) as journal:
        journal.rewind(2)  # as without the newest commits in the write-ahead log
    with refused(BadInput, file=pipeline.run.journal):
        await Pipeline(tmp_path, tiny_model).finish(first=3)
    assert pipeline.run.batches.steps() == [1, 2, 3, 4]


async def test_a_rewound_trainer_is_followed(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model)

    async def train(first: int, last: int) -> None:
        trainer = pipeline.trainer
        await StandInTrainer.train(trainer, 1, 2)
        trainer.incarnation = 1  # restarted from the checkpoint of step 1
        trainer.publish(1)
        await StandInTrainer.train(trainer, 2, STEPS)

    pipeline.trainer.train = train  # type: ignore[method-assign]
    await pipeline.finish()
    assert [batch.step for batch in pipeline.trainer.batches] == [1, 2, 2, 3, 4]
    assert pipeline.run.weights.acknowledged() == Version(1, 4)


async def test_an_environment_that_always_raises_ends_the_run_with_its_error(tmp_path: Path, tiny_model: Path):
    location = "tests.orchestrator.test_orchestrator:Broken"
    pipeline = Pipeline(tmp_path, tiny_model, train={"env": [{"id": location, "name": "broken"}]})
    with pytest.raises(RunFailed, match=r"'broken'.*KeyError: 'no such column: question'"):
        await pipeline.finish()


async def test_every_kind_of_failure_is_counted_and_logged_once_and_the_run_goes_on(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
):
    location = "tests.orchestrator.test_orchestrator:Mischief"
    pipeline = Pipeline(tmp_path, tiny_model, train={"env": [{"id": location, "name": "mischief", "timeout": 1.0}]})
    await pipeline.finish()
    assert [batch.step for batch in pipeline.trainer.batches] == [1, 2, 3, 4]
    journal = Journal(pipeline.run.journal)
    assert {"environment", "timeout", "empty", "invalid_reward"} <= journal.totals().drops.keys()
    messages = [
        record.getMessage() for record in caplog.records if "an episode of mischief failed" in record.getMessage()
    ]
    reasons = sorted(message.split("failed (")[1].split(":")[0] for message in messages)
    assert reasons == ["empty", "environment", "invalid_reward", "timeout"]
    errors = [key for record in read_metrics(pipeline.run.metrics) for key in record if key.startswith("errors/")]
    assert {"errors/timeout", "errors/invalid_reward"} <= set(errors)
    assert find_violations(pipeline.run, journal) == []


async def test_what_cannot_be_recorded_costs_its_episode_and_names_the_environment(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
):
    location = "tests.orchestrator.test_orchestrator:Careless"
    pipeline = Pipeline(tmp_path, tiny_model, train={"env": [{"id": location, "name": "careless"}]})
    await pipeline.finish()
    assert [batch.step for batch in pipeline.trainer.batches] == [1, 2, 3, 4]
    drops = Journal(pipeline.run.journal).totals().drops
    assert {"environment", "invalid_rollout", "invalid_reward"} <= drops.keys()
    assert "algorithm" not in drops
    assert "metric 'score' is None, not a number" in caplog.text
    assert "SystemExit" in caplog.text


async def test_turns_that_no_trainer_could_use_and_a_rollout_given_twice_cost_their_episodes(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
):
    location = "tests.orchestrator.test_orchestrator:Forger"
    pipeline = Pipeline(tmp_path, tiny_model, train={"env": [{"id": location, "name": "forger"}]})
    await pipeline.finish()
    assert [batch.step for batch in pipeline.trainer.batches] == [1, 2, 3, 4]
    assert {"invalid_rollout", "environment"} <= Journal(pipeline.run.journal).totals().drops.keys()
    assert "completion_ids contain 1000000000" in caplog.text
    assert "run() returned the same Rollout object twice" in caplog.text


async def test_an_environment_that_can_never_score_a_group_ends_the_run_with_its_error(
    tmp_path: Path, tiny_model: Path
):
    location = "tests.orchestrator.test_orchestrator:Unscorable"
    pipeline = Pipeline(tmp_path, tiny_model, train={"env": [{"id": location, "name": "unscorable"}]})
    with pytest.raises(RunFailed, match=r"'unscorable'.*score_group.*ConnectionError: the judge is away"):
        await pipeline.finish()


async def test_a_filter_that_takes_every_rollout_is_reported_and_ends_the_run_where_asked(
    tmp_path: Path, tiny_model: Path
):
    everything = {
        "type": "custom",
        "import_path": "tests.orchestrator.test_orchestrator:drop_short_answers",
        "kwargs": {"shortest": 1000},
        "enforce": True,
    }
    pipeline = Pipeline(tmp_path, tiny_model, pre_batch_filters=[everything], max_empty_batches=2)
    with pytest.raises(RunFailed, match=r"\b2\b.*drop_short_answers.*\b16\b"):
        await pipeline.finish()


async def test_a_second_orchestrator_in_a_run_directory_is_refused(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model)
    with hold_epoch(pipeline.run.root, "orchestrator"), refused(BadInput, key="RUN", value=pipeline.run.root):
        await pipeline.finish()


@pytest.mark.parametrize("seed", range(2))
async def test_stopped_at_any_moment_with_a_slow_disk_it_loses_no_draw(
    seed: int, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    rng, commit = random.Random(seed), Journal.commit

    def slowly(journal: Journal, *arguments: Any, **options: Any) -> None:
        time.sleep(rng.uniform(0, 0.1))
        commit(journal, *arguments, **options)

    monkeypatch.setattr(Journal, "commit", slowly)
    monkeypatch.setattr("headrace.orchestrator.pipeline.COMMIT_INTERVAL_S", 0.02)
    trained = 0
    for life in range(12):
        pipeline = Pipeline(tmp_path, tiny_model)
        pipeline.engine.delay = 0.02
        loop = asyncio.get_running_loop()
        stop = loop.call_later(rng.uniform(0.1, 0.3) if life < 4 else 100.0, os.kill, os.getpid(), signal.SIGTERM)
        await pipeline.finish(first=trained + 1)
        stop.cancel()
        trained += len(pipeline.trainer.batches)
        assert find_violations(pipeline.run, Journal(pipeline.run.journal)) == []
        if trained == STEPS and Journal(pipeline.run.journal).count_states().get("drawn", 0) == 0:
            break
    assert trained == STEPS
    assert life > 0  # it was stopped at least once
    assert Journal(pipeline.run.journal).count_states().get("drawn", 0) == 0


async def test_a_group_scored_together_is_dropped_whole_when_one_member_failed(tmp_path: Path, tiny_model: Path):
    location = "tests.orchestrator.test_orchestrator:Tournament"
    pipeline = Pipeline(tmp_path, tiny_model, train={"env": [{"id": location, "name": "tournament"}]})
    await pipeline.finish()
    journal = Journal(pipeline.run.journal)
    drops, groups = journal.totals().drops, journal.count_states()
    lost = groups["dropped:group_failed"]
    assert lost > 0
    assert drops["group_failed"] + drops["environment"] == 4 * lost
    for batch in pipeline.trainer.batches:
        assert len({entry.rollout for entry in batch.samples}) % 4 == 0


async def test_groups_scored_together_that_cannot_run_at_once_are_refused_at_the_start(
    tmp_path: Path, tiny_model: Path
):
    evaluated = {"env": [{"id": "tests.orchestrator.test_orchestrator:Tournament", "group_size": 5}]}
    pipeline = Pipeline(tmp_path, tiny_model, eval=evaluated, max_inflight_rollouts=4)
    with refused(key="orchestrator.max_inflight_rollouts", value=4):
        await pipeline.finish()


async def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KEY_OF_ENGINES", "secret\nline")
    pipeline = Pipeline(tmp_path, tiny_model, client={"admin_key_var": "KEY_OF_ENGINES"})
    with refused(BadInput, key="KEY_OF_ENGINES", value=None) as error:
        await pipeline.finish()
    assert "secret" not in str(error.value)


async def test_an_engine_that_dies_and_returns_elsewhere_costs_time_and_nothing_else(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model)
    pipeline.engine.delay = 0.01

    async def train(first: int, last: int) -> None:
        await StandInTrainer.train(pipeline.trainer, 1, 2)
        await pipeline.engine.die()
        await asyncio.sleep(0.2)
        await pipeline.engine.listen()
        await StandInTrainer.train(pipeline.trainer, 3, STEPS)

    pipeline.trainer.train = train  # type: ignore[method-assign]
    await pipeline.finish()
    assert [batch.step for batch in pipeline.trainer.batches] == [1, 2, 3, 4]
    assert "engine" not in Journal(pipeline.run.journal).totals().drops


async def test_an_engine_that_hangs_is_named_and_the_run_goes_on_when_it_answers_again(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
):
    pipeline = Pipeline(tmp_path, tiny_model, client={"timeout": 0.3})

    async def train(first: int, last: int) -> None:
        await StandInTrainer.train(pipeline.trainer, 1, 2)
        pipeline.engine.delay = 3600.0
        while "EngineTimeout" not in caplog.text:
            await asyncio.sleep(0.02)
        pipeline.engine.delay = 0.0
        await StandInTrainer.train(pipeline.trainer, 3, STEPS)

    pipeline.trainer.train = train  # type: ignore[method-assign]
    await pipeline.finish()
    assert [batch.step for batch in pipeline.trainer.batches] == [1, 2, 3, 4]
    assert Journal(pipeline.run.journal).totals().drops["engine"] > 0
    logged = [record for record in caplog.records if "EngineTimeout" in record.message and record.levelname == "ERROR"]
    assert len(logged) <= 2  # once for training, once for evaluation; the rest are counted


async def test_an_engine_that_never_comes_back_ends_the_run_with_its_name(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model, client={"retry_for": 0.1})

    async def train(first: int, last: int) -> None:
        await StandInTrainer.train(pipeline.trainer, 1, 1)
        await pipeline.engine.die()

    pipeline.trainer.train = train  # type: ignore[method-assign]
    with pytest.raises(Failure):
        await pipeline.finish()


async def test_a_waiting_loop_says_what_it_waits_for_and_from_whom(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace.orchestrator.orchestrator.FIRST_NOTICE_S", 0.0)
    pipeline = Pipeline(tmp_path, tiny_model, log_loop_interval=0.1)

    async def train(first: int, last: int) -> None:
        while "waiting for weights" not in caplog.text:
            await asyncio.sleep(0.05)
        await StandInTrainer.train(pipeline.trainer, 1, STEPS)

    pipeline.trainer.train = train  # type: ignore[method-assign]
    await pipeline.finish()
    assert "waiting for weights after step 1 from the trainer" in caplog.text  # batch 3 needs no more at level 1


async def test_a_pinned_evaluation_is_sampled_from_one_version(tmp_path: Path, tiny_model: Path):
    heldout = {"id": "reverse-text", "name": "heldout", "args": {"split": "eval", "num_tasks": 40}}
    pipeline = Pipeline(tmp_path, tiny_model, eval={"interval": 1, "pin_version": True, "env": [heldout]})
    pipeline.engine.delay = 0.01
    await pipeline.finish()
    oldest, newest = (pipeline.records(f"eval/heldout/version/{end}") for end in ("min", "max"))
    assert oldest == newest == {version: version for version in oldest}
    assert {0, STEPS} <= oldest.keys()


async def test_an_environment_in_worker_processes_trains_alike(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model, train={"env": [{"id": "reverse-text", "workers": 2}]})
    await pipeline.finish()
    assert [batch.step for batch in pipeline.trainer.batches] == [1, 2, 3, 4]
    assert find_violations(pipeline.run, Journal(pipeline.run.journal)) == []


async def test_a_filter_of_ones_own_is_named_by_import_path(tmp_path: Path, tiny_model: Path):
    own = {
        "type": "custom",
        "import_path": "tests.orchestrator.test_orchestrator:drop_short_answers",
        "kwargs": {"shortest": 7},
        "enforce": True,
    }
    pipeline = Pipeline(tmp_path, tiny_model, pre_batch_filters=[own])
    await pipeline.finish()
    assert sum(pipeline.records("pre_filters/drop_short_answers").values()) > 0
    for batch in pipeline.trainer.batches:
        assert min(int(entry.sample.mask.sum()) for entry in batch.samples) >= 7


async def test_what_a_step_waited_for_is_among_its_metrics(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model)
    await pipeline.finish()
    records = [r for r in read_metrics(pipeline.run.metrics) if "reward/all/mean" in r]
    assert all(r.keys() >= TIMES for r in records)


async def test_a_run_without_signal_ends_after_the_configured_number_of_empty_batches(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model, max_empty_batches=2)
    pipeline.engine.rng.random = lambda: 1.0  # always the wrong answer  # type: ignore[method-assign]
    # A group's answers are then all alike, and so are its rewards.
    with pytest.raises(RunFailed, match=r"\b2\b.*zero_advantage.*\b16\b"):
        await pipeline.finish()


@pytest.mark.parametrize("level", [0, 1, 3])
async def test_batches_by_tokens_fill_up_and_the_run_ends(level: int, tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model, batch_size=None, token_batch_size=500, max_async_level=level)
    await pipeline.finish()
    assert [batch.step for batch in pipeline.trainer.batches] == [1, 2, 3, 4]


async def test_environments_with_other_group_sizes_share_batches_at_level_zero(tmp_path: Path, tiny_model: Path):
    pairs = {"id": "reverse-text", "name": "pairs", "group_size": 2}
    eights = {"id": "reverse-text", "name": "eights", "group_size": 8}
    pipeline = Pipeline(tmp_path, tiny_model, train={"env": [pairs, eights]}, max_async_level=0)
    await pipeline.finish()
    assert {entry.env for batch in pipeline.trainer.batches for entry in batch.samples} == {"pairs", "eights"}
    assert Journal(pipeline.run.journal).count_states().get("drawn", 0) == 0


async def test_an_engine_that_comes_back_with_the_initial_model_gets_the_current_weights(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace.orchestrator.watcher.HEALTH_INTERVAL_S", 0.05)
    pipeline = Pipeline(tmp_path, tiny_model)

    async def train(first: int, last: int) -> None:
        await StandInTrainer.train(pipeline.trainer, 1, 2)
        while pipeline.engine.version.step < 2:
            await asyncio.sleep(0.01)
        pipeline.engine.version = Version(0, 0)  # restarted
        while pipeline.engine.version.step < 2:
            await asyncio.sleep(0.01)
        await StandInTrainer.train(pipeline.trainer, 3, STEPS)

    pipeline.trainer.train = train  # type: ignore[method-assign]
    await pipeline.finish()
    assert [batch.step for batch in pipeline.trainer.batches] == [1, 2, 3, 4]


async def test_a_missing_batch_is_sampled_again_from_the_same_prompts(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
):
    pipeline = Pipeline(tmp_path, tiny_model)
    await pipeline.finish()
    before = Journal(pipeline.run.journal).draws()
    pipeline.run.batches.path(2).unlink()
    again = Pipeline(tmp_path, tiny_model)
    again.trainer.incarnation = 1  # restarted from the checkpoint of step 1
    again.trainer.publish(1)
    await again.finish(first=2)
    assert "step-00000002.safetensors is missing" in caplog.text
    assert [batch.step for batch in again.trainer.batches] == [2, 3, 4]
    after = Journal(pipeline.run.journal).draws()
    assert [draw for draw, *_ in after[: len(before)]] == [draw for draw, *_ in before]
    assert "drawn" not in {state for _, state, _, _ in after}


async def test_rollouts_are_dumped_with_their_credit_and_drop_reason(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model)
    await pipeline.finish()
    tables = [pq.read_table(path).to_pylist() for path in RolloutKind.TRAIN.files(pipeline.run.rollouts).values()]
    assert len(tables) == STEPS
    rows = [row for table in tables for row in table]
    kept = [row for row in rows if row["drop_reason"] is None]
    assert len(kept) == sum(len({e.rollout for e in b.samples}) for b in pipeline.trainer.batches)
    assert all(row["samples"][0]["advantages"][-1] != 0 for row in kept)
    assert {row["drop_reason"] for row in rows} <= {None, "zero_advantage", "max_steps"}


async def test_what_a_lost_lineage_evaluated_is_evaluated_again_if_the_trainer_was_back_first(
    tmp_path: Path, tiny_model: Path
):
    pipeline = Pipeline(tmp_path, tiny_model)
    pipeline.config.train.env = []
    for version in range(STEPS + 1):
        MetricsLog(pipeline.run.metrics, "orchestrator").log(version, {"eval/heldout/avg@1": -1.0})
    pipeline.trainer.incarnation = 1
    pipeline.trainer.publish(1)
    status = Status(pipeline.run.status, "orchestrator")
    async with pipeline.engine:
        running = asyncio.create_task(main._run(pipeline.config, pipeline.run, status))
        while pipeline.run.weights.acknowledged() is None:
            await asyncio.sleep(0.005)
        pipeline.trainer.publish(STEPS)
        assert await asyncio.wait_for(running, 60)
    status.close("ended")
    assert [version for version, score in pipeline.records("eval/heldout/avg@1").items() if score >= 0] == [STEPS]
    assert pipeline.records("eval/incarnation") == {STEPS: 1}


async def test_without_an_environment_to_train_on_it_evaluates_what_is_published_until_the_last_version(
    tmp_path: Path, tiny_model: Path
):
    pipeline = Pipeline(tmp_path, tiny_model)
    pipeline.config.train.env = []
    pipeline.config.eval.pin_version = True
    status = Status(pipeline.run.status, "orchestrator")

    async def publish(step: int, evaluated: int) -> None:
        while evaluated not in pipeline.records("eval/heldout/avg@1"):
            await asyncio.sleep(0.005)
        pipeline.trainer.publish(step)

    async with pipeline.engine:
        running = asyncio.create_task(main._run(pipeline.config, pipeline.run, status))
        for evaluated, step in ((0, 2), (2, STEPS)):
            await asyncio.wait_for(publish(step, evaluated), 60)
        assert await asyncio.wait_for(running, 60)
    status.close("ended")
    assert list(pipeline.records("eval/heldout/avg@1")) == [0, 2, STEPS]
    for end in ("min", "max"):
        assert pipeline.records(f"eval/heldout/version/{end}") == {0: 0, 2: 2, STEPS: STEPS}
    assert Journal(pipeline.run.journal).count_states() == {}
    assert not any(pipeline.records(key) for key in ("progress/rollouts", "reward/all/mean"))
    assert max(pipeline.records("dispatcher/inflight_eval"), default=0) <= STEPS
