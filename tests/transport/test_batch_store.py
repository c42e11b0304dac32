"""Batches from the orchestrator to the trainer."""

import errno
import os
from pathlib import Path

import pytest

from headrace.rollout.batch import Batch
from headrace.rollout.schema import DamagedFile
from headrace.transport.batches import BatchStore


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(tmp_path / "batches")


def ship(store: BatchStore, *steps: int) -> None:
    for step in steps:
        store.prepare(Batch(step, 0, [], draw_ids=[step]))
        store.announce(step)


def test_an_announced_batch_is_read_back(store: BatchStore):
    ship(store, 3)
    assert store.exists(3)
    assert store.read(3).draw_ids == [3]


def test_a_prepared_batch_is_invisible_until_it_is_announced(store: BatchStore):
    store.prepare(Batch(1, 0, []))
    assert not store.exists(1)
    assert store.steps() == []
    store.announce(1)
    assert store.steps() == [1]


def test_preparing_again_replaces_what_was_prepared(store: BatchStore):
    store.prepare(Batch(1, 0, [], draw_ids=[1]))
    store.prepare(Batch(1, 0, [], draw_ids=[2]))
    store.announce(1)
    assert store.read(1).draw_ids == [2]


def test_a_full_disk_prepares_nothing(store: BatchStore, monkeypatch: pytest.MonkeyPatch):
    ship(store, 1)

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        store.prepare(Batch(2, 0, []))
    assert os.listdir(store.directory) == [store.path(1).name]


def test_after_a_crash_what_was_committed_is_announced_and_the_rest_forgotten(store: BatchStore):
    ship(store, 1)
    for step in (2, 3):
        store.prepare(Batch(step, 0, []))
    store.recover(committed_through=2)
    assert store.steps() == [1, 2]
    assert sorted(os.listdir(store.directory)) == [store.path(1).name, store.path(2).name]


def test_recovery_of_a_new_run_does_nothing(store: BatchStore):
    store.recover(committed_through=0)
    assert store.steps() == []


def test_steps_are_in_numerical_order(store: BatchStore):
    ship(store, 10, 9, 100)
    assert store.steps() == [9, 10, 100]


def test_a_checkpoint_makes_the_batches_through_its_step_unnecessary(store: BatchStore):
    ship(store, 1, 2, 3, 4)
    store.delete_through(2)
    assert store.steps() == [3, 4]
    store.delete_through(2)
    assert store.steps() == [3, 4]


def test_a_batch_under_another_steps_name_is_refused(store: BatchStore):
    ship(store, 1)
    store.path(1).rename(store.path(2))
    with pytest.raises(DamagedFile, match="step 1") as error:
        store.read(2)
    assert error.value.file == store.path(2)


@pytest.mark.timeout(20)
def test_a_fifo_in_place_of_a_batch_is_refused_at_once(store: BatchStore):
    store.directory.mkdir()
    os.mkfifo(store.path(1))
    with pytest.raises(DamagedFile) as error:
        store.read(1)
    assert error.value.file == store.path(1)


def test_a_batch_that_is_set_aside_counts_as_missing_and_is_kept(store: BatchStore):
    ship(store, 1, 2)
    content = store.path(2).read_bytes()
    assert store.set_aside(2).read_bytes() == content
    assert store.steps() == [1]


def test_a_batch_that_is_not_there_is_named(store: BatchStore):
    with pytest.raises(FileNotFoundError, match="step-00000007"):
        store.read(7)
