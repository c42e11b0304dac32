"""The parts of the drift, with an engine whose scores are known."""

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.schema import Completion, WeightVersionSpan
from headrace.orchestrator.drift import Drift, truncation_metrics
from headrace.rollout.batch import BatchSample
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import NOT_SAMPLED, Sample, Turn
from headrace.rollout.version import Version
from headrace.transport.run_dir import RunDir
from tests.orchestrator.stand_ins import StandInEngine, StandInTrainer
from tests.orchestrator.test_orchestrator import STEPS, Pipeline

V5 = Version(0, 5)


def k(x: float) -> float:
    return math.exp(x) - x - 1


class Rig:
    """Drift between a stand-in engine at version 5 and a run directory."""

    def __init__(self, engine: StandInEngine, run: RunDir, client: EngineClient) -> None:
        self.engine, self.run, self.client = engine, run, client
        self.drift = Drift(client, run.probes, completions=2, max_model_len=64)

    async def found(self) -> dict[str, float]:
        await self.drift.wait_for_requests(10.0)
        report = self.drift.end()
        assert report is not None
        assert report[0] == 5
        return report[1]


@pytest_asyncio.fixture
async def rig(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Rig]:
    run = RunDir(tmp_path)
    engine = StandInEngine(tiny_model, run)
    engine.version = V5
    async with engine:
        client = EngineClient(run.endpoints, retry_for=0.1)
        yield Rig(engine, run, client)
        await client.close()


def probe(
    tokens: list[int], logprobs: list[float], versions: list[int], trainer: list[float], temperature: float = 1.0
) -> BatchSample:
    """A sequence whose completion has these logprobs, versions and trainer's logprobs."""
    prompt = len(tokens) - len(logprobs)
    blank = [0.0] * prompt
    sample = Sample(
        np.array(tokens),
        np.arange(len(tokens)) >= prompt,
        np.array([*blank, *logprobs]),
        np.array([NOT_SAMPLED] * prompt + versions),
        prompt,
        temperature,
    )
    sample.set_stream("trainer_logprobs", np.array([*blank, *trainer], np.float32))
    return BatchSample(sample, "env", 0)


def completion(logprobs: list[float], *spans: tuple[str, int, int]) -> Completion:
    ids = list(range(10, 10 + len(logprobs)))
    return Completion(ids, logprobs, [WeightVersionSpan(*span) for span in spans], "stop")


async def test_engine_and_staleness_are_the_hand_worked_means(rig: Rig):
    rig.engine.score_token = lambda version, token, temperature: -token / 100 / temperature
    stale = probe([1, 2, 30, 40], [-0.5, -0.1], [3, 3], [-0.35, -0.4])  # e = -.3, -.4
    newer = probe([1, 2, 20], [-0.2], [5], [-0.1], temperature=0.5)  # e = -.4; sampled by 5 itself
    across = probe([1, 50, 60], [-0.5, -0.5], [3, 4], [-0.5, -0.7])  # e = -.5, -.6; an update came within
    rig.run.probes.write(V5, [stale, newer, across])
    rig.drift.follow(V5)
    values = await rig.found()
    engine = [-0.05, 0.0, 0.3, 0.0, -0.1]
    assert values["drift/engine"] == pytest.approx(sum(map(k, engine)) / 5, rel=1e-5)
    assert values["drift/engine/abs"] == pytest.approx(0.45 / 5, rel=1e-5)
    assert values["drift/engine/tokens"] == 5
    assert values["drift/staleness"] == pytest.approx((k(0.2) + k(-0.3)) / 2, rel=1e-5)
    assert values["drift/staleness/abs"] == pytest.approx(0.25, rel=1e-5)
    assert values["drift/staleness/tokens"] == 2
    assert values["drift/staleness/age"] == 2
    assert (values["drift/discarded"], values["drift/failed"]) == (0, 0)


async def test_decode_and_kept_kv_are_the_hand_worked_means(rig: Rig):
    rig.engine.score_token = lambda version, token, temperature: -token / 100 / temperature
    rig.drift.follow(V5)
    rig.drift.observe([1, 2], completion([-0.2, -0.2], ("0-5", 0, 2)), 0.5)  # e = -.2, -.22
    mixed = completion([-9.0, -0.1, -0.2, -0.13, -0.14], ("0-4", 0, 1), ("0-5", 1, 5))
    rig.drift.observe([1, 2], mixed, 1.0)  # e = ., -.11, -.12, -.13, -.14
    rig.drift.observe(
        [1, 2], completion([-9.0, -9.0], ("0-4", 0, 1), ("0-5", 1, 2)), 1.0
    )  # too little since the update
    values = await rig.found()
    assert values["drift/decode"] == pytest.approx((k(0.0) + k(-0.02)) / 2, rel=1e-5)
    assert values["drift/decode/tokens"] == 2
    assert values["drift/kept_kv"] == pytest.approx((k(-0.01) + k(0.08)) / 4, rel=1e-5)
    assert values["drift/kept_kv/abs"] == pytest.approx(0.09 / 4, rel=1e-5)
    assert values["drift/kept_kv/tokens"] == 4
    assert "drift/engine" not in values


async def test_only_a_few_completions_that_end_at_the_current_version_are_asked_about(rig: Rig):
    rig.drift.follow(V5)
    for _ in range(5):
        rig.drift.observe([1], completion([-0.5], ("0-5", 0, 1)), 1.0)
        rig.drift.observe([1], completion([-0.5], ("0-4", 0, 1)), 1.0)
        rig.drift.observe([1], completion([-0.5], ("1-5", 0, 1)), 1.0)  # of another lineage
    values = await rig.found()
    assert values["drift/decode/tokens"] == 2
    assert "drift/kept_kv" not in values


async def test_answers_of_another_version_are_discarded_and_counted(rig: Rig):
    rig.run.probes.write(V5, [probe([1, 2, 3], [-0.5], [4], [-0.5]), probe([1, 2, 4], [-0.5], [4], [-0.5])])
    rig.engine.version = Version(0, 6)
    rig.drift.follow(V5)
    rig.drift.observe([1], completion([-0.5], ("0-5", 0, 1)), 1.0)
    assert await rig.found() == {"drift/discarded": 3, "drift/failed": 0}


async def test_a_new_version_reports_the_last_one_and_gives_up_what_it_had_asked(rig: Rig):
    rig.drift.follow(V5)
    rig.drift.observe([1], completion([-0.5], ("0-5", 0, 1)), 1.0)
    await rig.drift.wait_for_requests(10.0)
    rig.engine.delay = 3600.0
    rig.drift.observe([1], completion([-0.5], ("0-5", 0, 1)), 1.0)
    await asyncio.sleep(0)
    report = rig.drift.follow(Version(0, 6))
    assert report is not None
    step, values = report
    assert (step, values["drift/decode/tokens"], values["drift/discarded"]) == (5, 1, 1)


async def test_a_version_about_which_nothing_was_asked_has_no_report(rig: Rig):
    rig.drift.follow(V5)
    await rig.drift.wait_for_requests(10.0)
    assert rig.drift.end() is None


async def test_failures_are_counted_and_logged_once(rig: Rig, caplog: pytest.LogCaptureFixture):
    rig.engine.broken = True
    rig.run.probes.write(V5, [probe([1, 2, 3], [-0.5], [4], [-0.5])] * 3)
    rig.drift.follow(V5)
    assert await rig.found() == {"drift/discarded": 0, "drift/failed": 3}
    assert len(caplog.records) == 1
    assert "out of order" in caplog.text


async def test_a_damaged_probe_is_counted_and_named(rig: Rig, caplog: pytest.LogCaptureFixture):
    rig.run.probes.directory.mkdir()
    rig.run.probes.path(V5).write_bytes(b"torn")
    rig.drift.follow(V5)
    assert await rig.found() == {"drift/discarded": 0, "drift/failed": 1}
    assert "v-0-5.safetensors: not a readable batch" in caplog.text


async def test_an_engine_that_hangs_holds_nothing_up(rig: Rig):
    rig.drift = Drift(rig.client, rig.run.probes, completions=2, max_model_len=64, timeout_s=0.05)
    rig.engine.delay = 3600.0
    rig.drift.follow(V5)
    rig.drift.observe([1], completion([-0.5], ("0-5", 0, 1)), 1.0)
    assert await rig.found() == {"drift/discarded": 0, "drift/failed": 1}


async def test_a_sequence_that_fills_the_model_is_scored_without_its_last_token(rig: Rig):
    tokens = list(range(64))
    rig.run.probes.write(V5, [probe(tokens, [-0.5] * 3, [4] * 3, [-0.6] * 3)])
    rig.drift.follow(V5)
    rig.drift.observe(tokens[:62], completion([-0.5, -0.5], ("0-5", 0, 2)), 1.0)
    values = await rig.found()
    assert values["drift/engine/tokens"] == 2
    assert values["drift/engine/abs"] == pytest.approx(0.1, rel=1e-5)
    assert values["drift/decode/tokens"] == 1


async def test_a_difference_that_overflows_is_left_out(rig: Rig):
    rig.run.probes.write(V5, [probe([1, 2], [-0.5], [5], [999.0])])
    rig.drift.follow(V5)
    values = await rig.found()
    assert "drift/engine" not in values
    assert values["drift/engine/abs"] == pytest.approx(999.5)


def test_truncation_is_the_log_of_what_was_left_to_choose_from():
    # Of .5, .3 and .2, top-k 2 leaves .8; a second turn could choose from .5 alone, a third from everything.
    turns = [
        Turn([1], [2], [math.log(0.3)], [0], 1.0, truncated_logprobs=[math.log(0.3 / 0.8)]),
        Turn([1, 2, 3], [4], [math.log(0.5)], [0], 1.0, truncated_logprobs=[0.0]),
        Turn([1, 2, 3, 4], [5], [math.log(0.2)], [0], 1.0),
    ]
    (sample,) = merge_turns(turns)
    values = truncation_metrics([sample])
    x = [math.log(0.8), math.log(0.5), 0.0]
    assert values["drift/truncation"] == pytest.approx(sum(map(k, x)) / 3, rel=1e-5)
    assert values["drift/truncation/abs"] == pytest.approx(-sum(x) / 3, rel=1e-5)
    assert values["drift/truncation/tokens"] == 3


def test_sampling_from_the_whole_distribution_has_no_truncation():
    (sample,) = merge_turns([Turn([1], [2], [-0.5], [0], 1.0)])
    assert sample.streams == {}
    assert truncation_metrics([sample]) == {}


async def test_a_run_records_the_drift_of_its_versions_through_a_rewind(tmp_path: Path, tiny_model: Path):
    pipeline = Pipeline(tmp_path, tiny_model)
    trainer, publish = pipeline.trainer, pipeline.trainer.publish
    pipeline.engine.score_token = lambda version, token, temperature: -0.5 - version.step / 10

    def publish_with_probe(step: int) -> None:
        entries = trainer.batches[-1].samples
        for entry in entries:
            entry.sample.streams = {"trainer_logprobs": np.full(len(entry.sample), -0.5, np.float32)}
        pipeline.run.probes.write(Version(trainer.incarnation, step), entries)
        publish(step)

    async def train(first: int, last: int) -> None:
        await StandInTrainer.train(trainer, 1, 2)
        trainer.incarnation = 1  # restarted from the checkpoint of step 1
        publish(1)
        await StandInTrainer.train(trainer, 2, last)

    trainer.publish = publish_with_probe  # type: ignore[method-assign]
    trainer.train = train  # type: ignore[method-assign]
    await pipeline.finish()
    engine, stale = pipeline.records("drift/engine/abs"), pipeline.records("drift/staleness/abs")
    assert STEPS in engine  # the last version, and those before that were not passed over at once
    assert engine == pytest.approx({step: step / 10 for step in engine}, rel=1e-5)
    assert stale == pytest.approx({step: step / 10 for step in stale}, rel=1e-5)
    assert pipeline.records("drift/decode/abs")[0] == pytest.approx(0.0, abs=1e-6)
    assert set(pipeline.records("drift/failed").values()) == {0}
