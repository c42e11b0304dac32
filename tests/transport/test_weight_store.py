"""Weights from the trainer to the engine."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.rollout.schema import SCHEMA, SchemaError
from headrace.rollout.version import Version
from headrace.transport.digests import DIGESTS
from headrace.transport.files import MARKER
from headrace.transport.weights import WeightStore, checksum, read_marker


def model(content: bytes = b"tensors") -> Callable[[Path], None]:
    """A writer of a model directory."""

    def write(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(content)

    return write


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights")


def test_nothing_is_published_before_the_first_version(store: WeightStore):
    assert store.published() == []
    assert store.latest() is None
    assert store.acknowledged() is None


def test_a_published_version_is_a_model_directory_with_a_marker(store: WeightStore):
    marker = store.publish(Version(0, 7), model())
    directory = store.path(Version(0, 7))
    assert directory.name == "v-0-7"
    assert {path.name for path in directory.iterdir()} == {MARKER, DIGESTS, "config.json", "model.safetensors"}
    assert read_marker(directory) == marker
    assert marker.version == Version(0, 7)
    assert json.loads((directory / MARKER).read_text())["schema"] == SCHEMA


def test_the_checksum_is_of_the_tensors_and_their_names(store: WeightStore):
    marker = store.publish(Version(0, 1), model(b"abc"))
    of_file = hashlib.blake2b(b"abc", digest_size=16).digest()
    assert marker.checksum == hashlib.blake2b(b"model.safetensors" + of_file, digest_size=16).hexdigest()
    assert marker.checksum == checksum(store.path(Version(0, 1)))
    assert marker.checksum != store.publish(Version(0, 2), model(b"abd")).checksum


def test_settings_beside_the_tensors_do_not_change_the_checksum(store: WeightStore):
    marker = store.publish(Version(0, 1), model())
    (store.path(Version(0, 1)) / "generation_config.json").write_text("{}")
    assert checksum(store.path(Version(0, 1))) == marker.checksum


def test_a_version_is_invisible_while_it_is_written(store: WeightStore):
    store.publish(Version(0, 1), model())

    def look_while_writing(directory: Path) -> None:
        model()(directory)
        assert store.published() == [Version(0, 1)]

    store.publish(Version(0, 2), look_while_writing)
    assert store.published() == [Version(0, 1), Version(0, 2)]


def test_a_failed_write_publishes_nothing_and_leaves_no_debris(store: WeightStore):
    def fail(directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    store.publish(Version(0, 1), model())
    with pytest.raises(OSError, match="No space left"):
        store.publish(Version(0, 2), fail)
    assert store.published() == [Version(0, 1)]
    assert os.listdir(store.directory) == ["v-0-1"]  # on a full disk a half-written model is what must go first


def test_a_draft_that_a_kill_left_behind_is_not_published_and_does_not_leak_into_the_next(store: WeightStore):
    draft = store.directory / ".v-0-1.tmp"
    draft.mkdir(parents=True)
    (draft / "stale.safetensors").write_bytes(b"old")
    assert store.published() == []
    store.publish(Version(0, 1), model())
    assert not (store.path(Version(0, 1)) / "stale.safetensors").exists()


def test_a_directory_without_a_marker_is_no_version(store: WeightStore):
    store.path(Version(0, 3)).mkdir(parents=True)
    model()(store.path(Version(0, 3)))
    assert store.published() == []
    with pytest.raises(FileNotFoundError, match=r"v-0-3.*COMPLETE\.json"):
        read_marker(store.path(Version(0, 3)))


def test_versions_are_ordered_by_number_not_by_name(store: WeightStore):
    for step in (10, 9, 2):
        store.publish(Version(0, step), model())
    assert store.published() == [Version(0, 2), Version(0, 9), Version(0, 10)]


def test_a_rewound_trainers_version_is_the_latest(store: WeightStore):
    store.publish(Version(0, 73), model())
    store.publish(Version(1, 50), model())
    assert store.latest() == Version(1, 50)


def test_a_version_published_again_is_replaced(store: WeightStore):
    store.publish(Version(0, 1), model(b"first"))
    marker = store.publish(Version(0, 1), model(b"second"))
    assert (store.path(Version(0, 1)) / "model.safetensors").read_bytes() == b"second"
    assert read_marker(store.path(Version(0, 1))) == marker


def test_a_marker_of_a_newer_schema_is_refused(store: WeightStore):
    store.publish(Version(0, 1), model())
    path = store.path(Version(0, 1)) / MARKER
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": SCHEMA + 1}))
    with pytest.raises(SchemaError, match=rf"COMPLETE\.json.*\b{SCHEMA + 1}\b"):
        read_marker(store.path(Version(0, 1)))


def test_a_garbled_marker_is_refused_by_name(store: WeightStore):
    store.publish(Version(0, 1), model())
    (store.path(Version(0, 1)) / MARKER).write_text("{")
    with pytest.raises(SchemaError, match=r"COMPLETE\.json"):
        read_marker(store.path(Version(0, 1)))


def test_an_acknowledgement_is_read_back(store: WeightStore):
    store.acknowledge(Version(0, 3))
    store.acknowledge(Version(1, 2))
    assert store.acknowledged() == Version(1, 2)


def test_an_acknowledgement_carries_its_schema_and_refuses_a_newer_one(store: WeightStore):
    # spec: `schema = 1` in every file
    store.acknowledge(Version(0, 3))
    (path,) = store.directory.glob("*.json")
    content = json.loads(path.read_text())
    assert content["schema"] == SCHEMA
    path.write_text(json.dumps({**content, "schema": SCHEMA + 1}))
    with pytest.raises(SchemaError, match="acknowledged"):
        store.acknowledged()


def test_versions_that_every_engine_has_passed_are_retired(store: WeightStore):
    for step in range(5):
        store.publish(Version(0, step), model())
    store.acknowledge(Version(0, 3))
    store.retire(keep_last=1)
    assert store.published() == [Version(0, 3), Version(0, 4)]


def test_nothing_is_retired_before_an_engine_has_acknowledged(store: WeightStore):
    for step in range(3):
        store.publish(Version(0, step), model())
    store.retire(keep_last=1)
    assert len(store.published()) == 3


def test_a_version_that_an_engine_may_still_load_is_kept(store: WeightStore):
    for step in range(4):
        store.publish(Version(0, step), model())
    store.acknowledge(Version(0, 1))
    store.retire(keep_last=1)
    assert store.published() == [Version(0, 1), Version(0, 2), Version(0, 3)]


def test_the_newest_few_are_kept_although_passed(store: WeightStore):
    for step in range(5):
        store.publish(Version(0, step), model())
    store.acknowledge(Version(0, 4))
    store.retire(keep_last=3)
    assert store.published() == [Version(0, 2), Version(0, 3), Version(0, 4)]


def test_a_lost_lineage_is_retired_once_the_rewound_one_is_acknowledged(store: WeightStore):
    for version in (Version(0, 72), Version(0, 73), Version(1, 50)):
        store.publish(version, model())
    store.acknowledge(Version(0, 73))
    store.retire(keep_last=1)
    assert store.published() == [Version(0, 73), Version(1, 50)]
    store.acknowledge(Version(1, 50))
    store.retire(keep_last=1)
    assert store.published() == [Version(1, 50)]


def test_the_newest_version_of_a_step_that_a_teacher_needs_is_kept(store: WeightStore):
    for version in (Version(0, 2), Version(0, 4), Version(1, 4), Version(1, 5), Version(1, 6)):
        store.publish(version, model(), durable=version.step == 4)
    store.acknowledge(Version(1, 6))
    store.retire(keep_last=1, kept_steps=[3, 4])
    assert store.published() == [Version(1, 4), Version(1, 6)]
    assert store.of_step(4) == Version(1, 4)
    assert store.of_step(3) is None


def test_a_model_whose_tensors_were_changed_no_longer_has_its_markers_checksum(store: WeightStore):
    marker = store.publish(Version(0, 1), model())
    directory = store.path(Version(0, 1))
    shutil.copy(directory / "model.safetensors", directory / "model-2.safetensors")
    assert checksum(directory) != marker.checksum


def test_versions_that_a_trainer_will_publish_again_are_deleted(store: WeightStore):
    for step in (5, 6, 7):
        store.publish(Version(0, step), model())
    store.delete_after(6)
    assert store.published() == [Version(0, 5), Version(0, 6)]
    assert not store.path(Version(0, 7)).exists()
