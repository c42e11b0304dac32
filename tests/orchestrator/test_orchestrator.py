"""The whole orchestrator between a stand-in engine (real sockets) and a stand-in trainer (real files)."""

import asyncio
import errno
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from headrace.config.base import validate
from headrace.config.run import RunConfig
from headrace.environments.base import Environment
from headrace.observe.metrics import read_metrics
from headrace.observe.status import Status
from headrace.orchestrator import main
from headrace.orchestrator.journal import Journal
from headrace.orchestrator.pipeline import RunFailed
from headrace.rollout.batch import Batch
from headrace.rollout.version import Version, staleness
from headrace.transport.batches import BatchStore
from headrace.transport.run_dir import RunDir
from tests.orchestrator.stand_ins import StandInEngine, StandInTrainer

STEPS = 4


class Broken(Environment):
    """An environment with a bug."""

    def tasks(self):
        return [{"n": n} for n in range(8)]

    async def run(self, task, context):
        raise KeyError("no such column: question")


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
        self.config = validate(RunConfig, tree, "test")[0].orchestrator
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
    states = Journal(pipeline.run.journal).states()
    assert states.pop("drawn", 0) == 0
    assert states["shipped"] >= STEPS  # groups with a signal; the rest were dropped with a reason
    assert set(states) <= {"shipped", "dropped:zero_advantage", "dropped:max_steps"}


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

    def full_disk_at_step_3(store: BatchStore, batch: Batch) -> None:
        if batch.step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        prepare(store, batch)

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
    assert str(pipeline.engine.version) == "1-4"


async def test_an_environment_that_always_raises_ends_the_run_with_its_error(tmp_path: Path, tiny_model: Path):
    location = "tests.orchestrator.test_orchestrator:Broken"
    pipeline = Pipeline(tmp_path, tiny_model, train={"env": [{"id": location, "name": "broken"}]})
    with pytest.raises(RunFailed, match="'broken': environment: KeyError: 'no such column: question'"):
        await pipeline.finish()


async def test_a_run_without_signal_ends_after_the_configured_number_of_empty_batches(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model, max_empty_batches=2)
    pipeline.engine.rng.random = lambda: 1.0  # always the wrong answer  # type: ignore[method-assign]
    # A group's answers are then all alike, and so are its rewards.
    with pytest.raises(RunFailed, match=r"2 batches in a row without a signal.*zero_advantage 16"):
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
    assert Journal(pipeline.run.journal).states().get("drawn", 0) == 0


async def test_an_engine_that_comes_back_with_the_initial_model_gets_the_current_weights(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headrace.orchestrator.watcher.LOOK_AT_ENGINES", 0.05)
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


async def test_a_batch_that_is_gone_is_made_anew_from_the_same_prompts(
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
    assert "step-00000002.safetensors is gone" in caplog.text
    assert [batch.step for batch in again.trainer.batches] == [2, 3, 4]
    after = Journal(pipeline.run.journal).draws()
    assert [draw for draw, *_ in after[: len(before)]] == [draw for draw, *_ in before]
    assert "drawn" not in {state for _, state, _, _ in after}


async def test_rollouts_are_dumped_with_their_credit_and_drop_reason(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model)
    await pipeline.finish()
    tables = [pq.read_table(path).to_pylist() for path in sorted(pipeline.run.rollouts.glob("*.parquet"))]
    assert len(tables) == STEPS
    rows = [row for table in tables for row in table]
    kept = [row for row in rows if row["drop_reason"] is None]
    assert len(kept) == sum(len({e.rollout for e in b.samples}) for b in pipeline.trainer.batches)
    assert all(row["samples"][0]["advantages"][-1] != 0 for row in kept)
    assert {row["drop_reason"] for row in rows} <= {None, "zero_advantage", "max_steps"}
