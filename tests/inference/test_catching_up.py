"""A server that is started in the middle of a run: which of the published versions it begins with."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.server.main import _catch_up
from headrace.rollout.version import Version
from headrace.trainer.weights_link import WeightsSender, take_snapshot
from headrace.transport.run_dir import RunDir

V1, V2, V3, V4 = (Version(0, step) for step in (1, 2, 3, 4))
MakeModel = Callable[[int], Any]


class NotingThread(EngineThread):
    """Notes which versions are tried, and lets something happen before the first try."""

    def __init__(self, engine: Engine, at_first: Callable[[], None] = lambda: None) -> None:
        self.tried: list[Version] = []
        self._at_first = at_first
        super().__init__(engine)

    def update_weights(self, directory: Path, version: Version) -> str:
        self.tried.append(version)
        if len(self.tried) == 1:
            self._at_first()
        return super().update_weights(directory, version)


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


def test_a_version_that_is_retired_while_it_is_read_gives_way_to_a_newer_one(
    make_model: MakeModel, run: RunDir
) -> None:
    def train_on() -> None:
        for version in (V1, V2):
            shutil.rmtree(run.weights.path(version))
        run.weights.publish(V3, make_model(3).save_pretrained)

    for version in (V1, V2):
        run.weights.publish(version, make_model(version.step).save_pretrained)
    thread = NotingThread(Engine(make_model(0), max_model_len=64), train_on)
    _catch_up(thread, run)
    assert thread.tried == [V2, V3] and thread.engine.version == V3
    thread.stop()


def test_what_a_lost_trainer_had_in_memory_is_asked_for_once(
    make_model: MakeModel, run: RunDir, sender: WeightsSender
) -> None:
    run.weights.publish(V1, make_model(1).save_pretrained)
    for version in (V2, V3):
        offer(run, sender, version, make_model(version.step))
    sender.close()
    thread = NotingThread(Engine(make_model(0), max_model_len=64))
    _catch_up(thread, run)
    assert thread.tried == [V3, V1] and thread.engine.version == V1
    thread.stop()


def test_the_trainer_that_comes_after_a_lost_one_is_asked(
    make_model: MakeModel, run: RunDir, sender: WeightsSender
) -> None:
    lost = WeightsSender()
    for version in (V1, V2):
        offer(run, lost, version, make_model(version.step))
    lost.close()
    thread = NotingThread(Engine(make_model(0), max_model_len=64), lambda: offer(run, sender, V4, make_model(4)))
    _catch_up(thread, run)
    assert thread.tried == [V2, V4] and thread.engine.version == V4
    thread.stop()
