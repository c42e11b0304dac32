"""A server that is started in the middle of a run: which of the published versions it begins with."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config.inference import InferenceConfig
from headrace.errors import AGAIN
from headrace.inference.embedded.backend import EmbeddedBackend
from headrace.inference.embedded.engine import Engine
from headrace.inference.server import main
from headrace.inference.server.main import _load_newest_weights
from headrace.rollout.version import Version
from headrace.trainer.snapshot import take_snapshot
from headrace.trainer.weights_link import WeightsSender
from headrace.transport.run_dir import RunDir
from tests.inference.serving import connect

V1, V2, V3, V4 = (Version(0, step) for step in (1, 2, 3, 4))
MakeModel = Callable[[int], Any]


class NotingBackend(EmbeddedBackend):
    """Notes which versions are tried, and lets something happen before the first try."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tried: list[Version] = []
        self.at_first: Callable[[], None] = lambda: None
        self.engine: Engine

    async def update_weights(self, directory: Path, version: Version) -> str:
        self.tried.append(version)
        if len(self.tried) == 1:
            self.at_first()
        return await super().update_weights(directory, version)


async def noting(
    model: Any, at_first: Callable[[], None] = lambda: None, kind: type[NotingBackend] = NotingBackend
) -> NotingBackend:
    engine = Engine(model, max_model_len=64)
    backend: NotingBackend = await connect(engine, kind=kind)
    backend.engine, backend.at_first = engine, at_first
    return backend


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def sender() -> Iterator[WeightsSender]:
    sender = WeightsSender()
    yield sender
    sender.close()


def offer(run: RunDir, sender: WeightsSender, version: Version, model: Any) -> None:
    snapshot = take_snapshot(model.named_parameters())
    run.weights.publish(version, lambda draft: sender.offer(version, snapshot, draft))


async def test_a_version_that_is_retired_while_it_is_read_gives_way_to_a_newer_one(
    make_model: MakeModel, run: RunDir
) -> None:
    def train_on() -> None:
        for version in (V1, V2):
            shutil.rmtree(run.weights.path(version))
        run.weights.publish(V3, make_model(3).save_pretrained)

    for version in (V1, V2):
        run.weights.publish(version, make_model(version.step).save_pretrained)
    backend = await noting(make_model(0), train_on)
    await _load_newest_weights(backend, run)
    assert backend.tried == [V2, V3] and backend.state().version == V3
    await backend.close()


async def test_what_a_lost_trainer_had_in_memory_is_asked_for_once(
    make_model: MakeModel, run: RunDir, sender: WeightsSender
) -> None:
    run.weights.publish(V1, make_model(1).save_pretrained)
    for version in (V2, V3):
        offer(run, sender, version, make_model(version.step))
    sender.close()
    backend = await noting(make_model(0))
    await _load_newest_weights(backend, run)
    assert backend.tried == [V3, V1] and backend.state().version == V1
    await backend.close()


async def test_the_trainer_that_comes_after_a_lost_one_is_asked(
    make_model: MakeModel, run: RunDir, sender: WeightsSender
) -> None:
    lost = WeightsSender()
    for version in (V1, V2):
        offer(run, lost, version, make_model(version.step))
    lost.close()
    backend = await noting(make_model(0), lambda: offer(run, sender, V4, make_model(4)))
    await _load_newest_weights(backend, run)
    assert backend.tried == [V2, V4] and backend.state().version == V4
    await backend.close()


class DyingBackend(NotingBackend):
    """Its engine dies while weights are on their way to it."""

    async def update_weights(self, directory: Path, version: Version) -> str:
        self.engine.step = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        await self.pause()
        await self.failure()
        return await super().update_weights(directory, version)


class SlowBackend(NotingBackend):
    """Its weights do not arrive, and the server is stopped meanwhile."""

    async def update_weights(self, directory: Path, version: Version) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        raise AssertionError


def serve(
    kind: type[NotingBackend], run: RunDir, make_model: MakeModel, directory: Path, patch: pytest.MonkeyPatch
) -> list[str]:
    """A server over such an engine; gives the addresses that it announced."""
    announced: list[str] = []

    async def start_engine(*_: object) -> NotingBackend:
        return await noting(make_model(0), kind=kind)

    run.weights.publish(V1, make_model(1).save_pretrained)
    patch.setattr(main, "start_engine", start_engine)
    main.serve(InferenceConfig(model={"name": str(directory)}), status=None, run=run, announce=announced.append)
    return announced


def test_a_server_whose_engine_dies_while_loading_weights_exits_for_a_restart(
    make_model: MakeModel, run: RunDir, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as left:
        serve(DyingBackend, run, make_model, model_directory, monkeypatch)
    assert left.value.code == AGAIN


def test_a_server_that_waits_for_weights_can_be_ended(
    make_model: MakeModel, run: RunDir, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve(SlowBackend, run, make_model, model_directory, monkeypatch) == []
