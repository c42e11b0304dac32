"""Probes as files: round trip, what is refused, what is deleted."""

from pathlib import Path

import numpy as np
import pytest

from headrace.rollout.batch import Batch, BatchSample, encode_batch
from headrace.rollout.schema import SchemaError
from headrace.rollout.version import Version
from headrace.transport.batches import KEEP_LAST_PROBES, TRAINER_LOGPROBS, ProbeStore
from tests.rollout.strategies import sample


@pytest.fixture
def store(tmp_path: Path) -> ProbeStore:
    return ProbeStore(tmp_path / "probes")


def probed() -> BatchSample:
    return BatchSample(sample(2, 3, trainer_logprobs=[0, 0, -1, -2, -3]), "math", 0)


def test_what_is_written_is_read(store: ProbeStore):
    store.write(Version(1, 7), [probed()])
    (read,) = store.read(Version(1, 7))
    expected = probed().sample
    for name in ("token_ids", "mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(read, name), getattr(expected, name))
    assert read.temperature == expected.temperature
    np.testing.assert_array_equal(read.streams[TRAINER_LOGPROBS], [0, 0, -1, -2, -3])


def test_a_version_without_a_probe_has_no_samples(store: ProbeStore):
    assert store.read(Version(0, 1)) == []
    assert store.versions() == []


def test_only_the_newest_stay_and_a_rewound_trainer_is_newer(store: ProbeStore):
    for version in (*(Version(0, step) for step in range(1, 8)), Version(1, 3)):
        store.write(version, [probed()])
    assert store.versions() == [Version(0, 5), Version(0, 6), Version(0, 7), Version(1, 3)]
    assert len(store.versions()) == KEEP_LAST_PROBES


def test_what_a_kill_left_half_written_is_no_probe(store: ProbeStore):
    store.write(Version(0, 1), [probed()])
    (store.directory / ".v-0-2.safetensors.4711.tmp").write_bytes(b"half")
    assert store.versions() == [Version(0, 1)]
    assert store.read(Version(0, 2)) == []
    store.write(Version(0, 2), [probed()])
    assert len(list(store.directory.iterdir())) == 2


def test_damaged_foreign_and_misplaced_files_are_refused_by_name(store: ProbeStore):
    store.write(Version(0, 1), [probed()])
    path = store.path(Version(0, 2))
    path.write_bytes(store.path(Version(0, 1)).read_bytes())
    with pytest.raises(SchemaError, match=r"v-0-2\.safetensors .*0-1"):
        store.read(Version(0, 2))
    path.write_bytes(store.path(Version(0, 1)).read_bytes()[:-4])
    with pytest.raises(SchemaError, match=r"v-0-2\.safetensors"):
        store.read(Version(0, 2))
    path.write_bytes(encode_batch(Batch(2, 0, [BatchSample(sample(1, 1), "math", 0)])))
    with pytest.raises(SchemaError, match="trainer_logprobs"):
        store.read(Version(0, 2))
