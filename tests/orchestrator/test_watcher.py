"""The watcher, when trainers and engines die while it brings the ones to what the others publish."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.errors import EngineFailed
from headrace.inference.schema import SCHEMA_HEADER, Health, UpdateWeightsRequest
from headrace.observe.status import Status
from headrace.orchestrator.watcher import WeightWatcher
from headrace.rollout.version import Version
from headrace.transport.run_dir import RunDir
from headrace.transport.weights_link import MANIFEST
from tests.orchestrator.stand_ins import StandInEngine

V1, V2, NEXT = Version(0, 1), Version(0, 2), Version(1, 1)


class LinkedEngine(StandInEngine):
    """Cannot load the versions whose trainer is gone."""

    gone: frozenset[Version] = frozenset()
    refuses = dies = False
    slow = 0.0
    updates = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def update_weights(self, request: web.Request) -> web.Response:
        self.updates += 1
        body = msgspec.json.decode(await request.read(), type=UpdateWeightsRequest)
        await asyncio.sleep(self.slow)
        if self.dies:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if self.refuses:
            return web.json_response({"error": {"message": "no such directory", "type": "x"}}, status=400)
        if Version(body.incarnation, body.step) in self.gone:
            error = {"message": "the trainer cannot be reached", "type": "bad_gateway"}
            return web.json_response({"error": error}, status=502, headers={SCHEMA_HEADER: "1"})
        return await super().update_weights(request)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.orchestrator.watcher.HEALTH_INTERVAL_S", 0.02)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def status(tmp_path: Path) -> Iterator[Status]:
    status = Status(tmp_path / "status", "orchestrator")
    yield status
    status.close("done")


def publish(run: RunDir, version: Version, name: str = MANIFEST) -> None:
    run.weights.publish(version, lambda draft: (draft / name).write_text(str(version)) and None)


@contextlib.asynccontextmanager
async def watching(
    run: RunDir, model: Path, status: Status, deadline: float = 60.0, others: Sequence[str] = (), timeout: float = 600.0
):
    async with LinkedEngine(model, run) as engine:
        client = EngineClient(lambda: [*others, engine.url], timeout=timeout)
        yield engine, WeightWatcher(run.weights, client, status, deadline_s=deadline)
        await client.close()


async def test_when_the_trainer_dies_its_next_version_is_loaded_instead(
    run: RunDir, tiny_model: Path, status: Status
) -> None:
    async with watching(run, tiny_model, status) as (engine, watcher):
        publish(run, V1)
        engine.gone = frozenset({V1})
        loading = asyncio.create_task(watcher.load(V1))
        await asyncio.sleep(0.1)
        assert not loading.done()
        publish(run, NEXT)  # it was started again
        assert await loading == watcher.version == engine.version == NEXT
        assert run.weights.acknowledged() == NEXT


async def test_a_trainer_that_stays_away_is_named_at_the_deadline(
    run: RunDir, tiny_model: Path, status: Status
) -> None:
    async with watching(run, tiny_model, status, deadline=0.1) as (engine, watcher):
        publish(run, V1)
        engine.gone = frozenset({V1})
        with pytest.raises(EngineFailed, match="the trainer cannot be reached"):
            await watcher.load(V1)
        assert watcher.version == Version(0, 0)


async def test_files_that_cannot_be_loaded_are_not_tried_again(run: RunDir, tiny_model: Path, status: Status) -> None:
    async with watching(run, tiny_model, status) as (engine, watcher):
        publish(run, V1, "model.safetensors")
        engine.gone = frozenset({V1})
        with pytest.raises(EngineFailed):
            await watcher.load(V1)


async def test_an_engine_that_restarts_while_the_trainer_is_away_gets_what_comes_next(
    run: RunDir, tiny_model: Path, status: Status
) -> None:
    async with watching(run, tiny_model, status) as (engine, watcher):
        publish(run, V1)
        await watcher.load(V1)
        seen: list[Version] = []
        following = asyncio.create_task(watcher.follow(seen.append))
        engine.gone, engine.version = frozenset({V1}), Version(0, 0)  # both died
        await asyncio.sleep(0.2)
        assert not following.done()
        publish(run, NEXT)
        while not seen:
            await asyncio.sleep(0.01)
        assert await watcher.load(seen[-1]) == engine.version == NEXT
        following.cancel()


@pytest.mark.parametrize("name", [MANIFEST, "model.safetensors"])
@pytest.mark.parametrize("fault", ["dies", "refuses", "gone", "slow"])
async def test_an_engine_that_cannot_be_brought_up_to_date_is_tried_again(
    run: RunDir, tiny_model: Path, status: Status, caplog: pytest.LogCaptureFixture, fault: str, name: str
) -> None:
    timeout = 0.1 if fault == "slow" else 600.0
    async with watching(run, tiny_model, status, timeout=timeout) as (engine, watcher):
        publish(run, V1, name)
        await watcher.load(V1)
        following = asyncio.create_task(watcher.follow(lambda version: None))
        engine.version, tried = Version(0, 0), engine.updates  # restarted
        setattr(engine, fault, {"gone": frozenset({V1}), "slow": 3600.0}.get(fault, True))
        while engine.updates < tried + 3:
            assert not following.done()
            await asyncio.sleep(0.01)
        delattr(engine, fault)
        while engine.version != V1:
            assert not following.done()
            await asyncio.sleep(0.01)
        assert caplog.text.count("cannot be updated yet") == 1
        following.cancel()


async def test_a_restarted_engine_does_not_wait_for_another_that_cannot_be_reached(
    run: RunDir, tiny_model: Path, status: Status
) -> None:
    others: list[str] = []
    async with watching(run, tiny_model, status, others=others) as (engine, watcher):
        publish(run, V1)
        await watcher.load(V1)
        others.append("http://127.0.0.1:9")
        following = asyncio.create_task(watcher.follow(lambda version: None))
        engine.version = Version(0, 0)  # restarted
        while engine.version != V1:
            assert not following.done()
            await asyncio.sleep(0.01)
        following.cancel()


async def test_new_weights_do_not_wait_for_an_engine_that_has_died_and_reach_it_when_it_is_back(
    run: RunDir, tiny_model: Path, status: Status
) -> None:
    async with LinkedEngine(tiny_model, run) as other:
        others = [other.url]
        async with watching(run, tiny_model, status, others=others) as (engine, watcher):
            publish(run, V1)
            assert await watcher.load(V1) == other.version == V1
            await other.die()
            publish(run, V2)
            async with asyncio.timeout(5.0):  # far from how long an engine that is the only one is waited for
                assert await watcher.load(V2) == engine.version == V2
            assert run.weights.acknowledged() == V2
            await other.listen()
            others[:] = [other.url]
            following = asyncio.create_task(watcher.follow(lambda version: None))
            while other.version != V2:
                assert not following.done()
                await asyncio.sleep(0.01)
            following.cancel()


async def test_an_engine_that_is_up_to_date_is_left_alone_when_another_is_behind(
    run: RunDir, tiny_model: Path, status: Status
) -> None:
    async with LinkedEngine(tiny_model, run) as other:
        async with watching(run, tiny_model, status, others=[other.url]) as (engine, watcher):
            publish(run, V1)
            await watcher.load(V1)
            following = asyncio.create_task(watcher.follow(lambda version: None))
            engine.version = Version(0, 0)  # restarted
            while engine.version != V1:
                await asyncio.sleep(0.01)
            following.cancel()
        assert (engine.updates, other.updates) == (2, 1)


async def test_an_engine_that_takes_longer_than_a_request_may_is_asked_again(
    run: RunDir, tiny_model: Path, status: Status
) -> None:
    async with watching(run, tiny_model, status, timeout=0.1) as (engine, watcher):
        publish(run, V1, "model.safetensors")
        engine.slow = 3600.0
        loading = asyncio.create_task(watcher.load(V1))
        while engine.updates < 2:
            await asyncio.sleep(0.01)
        engine.slow = 0.0
        assert await loading == engine.version == V1


async def test_an_orchestrator_starts_although_the_last_trainers_memory_is_gone(
    run: RunDir, tiny_model: Path, status: Status
) -> None:
    async with watching(run, tiny_model, status) as (engine, watcher):
        publish(run, V2)
        engine.gone = frozenset({V2})
        await watcher.synchronize()
        assert watcher.version == engine.version == Version(0, 0)


async def test_what_the_engines_say_of_themselves_is_passed_on_at_each_look(
    run: RunDir, tiny_model: Path, status: Status
) -> None:
    async with watching(run, tiny_model, status) as (engine, watcher):
        reports: asyncio.Queue[dict[str, Health]] = asyncio.Queue()
        following = asyncio.create_task(watcher.follow(lambda version: None, reports.put_nowait))
        for _ in range(2):
            (report,) = (await asyncio.wait_for(reports.get(), 5.0)).items()
            assert (report[0], report[1].capacity) == (engine.url, 16)
        following.cancel()
