"""A batch as bytes: what goes in comes out, and what must not be read is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from headrace.rollout.batch import Batch, BatchSample, encode_batch, read_batch
from headrace.rollout.schema import SCHEMA, DamagedFile, SchemaError
from headrace.rollout.types import Sample
from tests.rollout.strategies import FIXED, assert_same, floats32, sample, samples


def decode(content: bytes, directory: Path) -> Batch:
    path = directory / "batch.safetensors"
    path.write_bytes(content)
    return read_batch(path)


def with_header(
    content: bytes, columns: dict[str, np.ndarray] | None = None, without: str = "", **changes: object
) -> bytes:
    """The same file without a digest, with other columns or header fields."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["headrace"])
    kept = {name: column for name, column in {**load(content), **(columns or {})}.items() if name != without}
    return save(kept, metadata={"headrace": json.dumps({**header, "file_digest": "", **changes})})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@FIXED
@given(
    st.lists(st.tuples(samples(), st.sampled_from(["math", "code", "reverse text"]), st.integers(0, 500)), max_size=5),
    st.integers(1, 10**6),
    st.integers(0, 10),
    st.lists(st.integers(0, 2**40), max_size=4),
    st.dictionaries(st.text(max_size=8), st.integers(0, 2**40), max_size=3),
)
def test_a_batch_comes_back_as_it_was(directory, entries, step, incarnation, draw_ids, counts):
    batch = Batch(step, incarnation, [BatchSample(*entry) for entry in entries], draw_ids, counts)
    back = decode(encode_batch(batch), directory)
    assert (back.step, back.incarnation, back.draw_ids, back.counts) == (step, incarnation, draw_ids, counts)
    assert [(entry.env, entry.rollout) for entry in back.samples] == [(env, rollout) for _, env, rollout in entries]
    for mine, theirs in zip(batch.samples, back.samples, strict=True):
        assert_same(mine.sample, theirs.sample)


def test_an_empty_batch_comes_back_empty(directory: Path):
    back = decode(encode_batch(Batch(1, 0, [])), directory)
    assert (back.step, back.samples, back.draw_ids, back.counts) == (1, [], [], {})


def test_a_stream_stays_with_the_samples_that_have_it(directory: Path):
    batch = Batch(
        4,
        0,
        [
            BatchSample(sample(1, 1, advantages=[0, 2]), "math", 0),
            BatchSample(sample(1, 2), "opd", 1),
            BatchSample(sample(0, 1, advantages=[3], teacher_entropy=[0.25]), "math", 2),
        ],
    )
    first, second, third = (entry.sample.streams for entry in decode(encode_batch(batch), directory).samples)
    assert {name: values.tolist() for name, values in first.items()} == {"advantages": [0, 2]}
    assert second == {}
    assert {name: values.tolist() for name, values in third.items()} == {"advantages": [3], "teacher_entropy": [0.25]}


@FIXED
@given(st.lists(floats32(), min_size=1, max_size=5))
def test_logprobs_survive_to_the_last_bit(directory: Path, logprobs: list[float]):
    length = len(logprobs)
    original = Sample(range(length), [True] * length, logprobs, [0] * length, 0)
    (back,) = decode(encode_batch(Batch(1, 0, [BatchSample(original, "e", 0)])), directory).samples
    assert back.sample.logprobs.tobytes() == np.asarray(logprobs, np.float32).tobytes()


def test_the_same_batch_has_the_same_bytes():
    batch = Batch(3, 0, [BatchSample(sample(2, 2, advantages=[0, 0, 1, 1]), "math", 0)], [1, 2], {"rollouts": 1})
    assert encode_batch(batch) == encode_batch(batch)


def test_a_misaligned_stream_is_refused_before_anything_is_written():
    broken = sample(2, 2)
    broken.streams["advantages"] = np.zeros(3, np.float32)  # past `set_stream`, as a user's algorithm might
    with pytest.raises(ValueError, match="advantages"):
        encode_batch(Batch(1, 0, [BatchSample(broken, "math", 0)]))


def test_integers_of_an_unknown_stream_stay_exact(directory: Path):
    # 2**24 + 1 is the first integer that float32 cannot hold
    routed = sample(0, 2)
    routed.streams["routed_expert"] = np.array([1, 2**24 + 1], np.int32)
    (back,) = decode(encode_batch(Batch(1, 0, [BatchSample(routed, "math", 0)])), directory).samples
    assert back.sample.streams["routed_expert"].tolist() == [1, 2**24 + 1]


def test_a_newer_schema_is_refused_by_name(directory: Path):
    newer = with_header(encode_batch(Batch(1, 0, [])), schema=SCHEMA + 1)
    with pytest.raises(SchemaError, match=rf"batch\.safetensors.*\b{SCHEMA + 1}\b"):
        decode(newer, directory)


def test_a_newer_schema_is_refused_even_if_its_header_has_another_shape(directory: Path):
    newer = save({}, metadata={"headrace": json.dumps({"schema": SCHEMA + 1, "steps": "other"})})
    with pytest.raises(SchemaError, match=rf"\b{SCHEMA + 1}\b"):
        decode(newer, directory)


def test_header_fields_of_a_later_minor_version_are_ignored(directory: Path):
    assert decode(with_header(encode_batch(Batch(5, 0, [])), colour="blue"), directory).step == 5


def test_a_header_without_its_fields_is_refused_with_the_files_name(directory: Path):
    with pytest.raises(SchemaError, match=r"batch\.safetensors"):
        decode(save({}, metadata={"headrace": json.dumps({"schema": 1})}), directory)


def test_columns_that_this_version_does_not_know_are_ignored(directory: Path):
    content = encode_batch(Batch(5, 0, [BatchSample(sample(1, 1), "math", 0)]))
    more = with_header(content, {"image_offsets": np.zeros(2, np.int64)})
    assert len(decode(more, directory).samples) == 1


def test_a_safetensors_file_that_is_no_batch_is_refused(directory: Path):
    for metadata in (None, {"format": "pt"}):
        with pytest.raises(SchemaError, match=r"batch\.safetensors"):
            decode(save({"weight": np.zeros(3, np.float32)}, metadata=metadata), directory)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused_with_its_name(directory: Path, kept: float):
    content = encode_batch(Batch(1, 0, [BatchSample(sample(40, 40), "math", 0)]))
    with pytest.raises(SchemaError, match=r"batch\.safetensors"):
        decode(content[: int(len(content) * kept)], directory)


def test_a_file_of_something_else_is_refused(directory: Path):
    with pytest.raises(SchemaError, match=r"batch\.safetensors"):
        decode(b"PK\x03\x04 this is a zip archive, perhaps", directory)


def test_a_batch_that_lacks_a_column_is_refused_with_the_files_name(directory: Path):
    content = encode_batch(Batch(1, 0, [BatchSample(sample(1, 1), "math", 0)]))
    with pytest.raises(DamagedFile, match=r"batch\.safetensors.*mask"):
        decode(with_header(content, without="mask"), directory)


@FIXED
@given(st.data())
def test_a_flipped_bit_is_found_or_changes_nothing(directory: Path, data: st.DataObject):
    content = bytearray(encode_batch(Batch(7, 0, [BatchSample(sample(2, 2, advantages=[0, 0, 1, 1]), "math", 3)], [5])))
    before = decode(bytes(content), directory)
    place = data.draw(st.integers(0, 8 * len(content) - 1))
    content[place // 8] ^= 1 << place % 8
    try:
        after = decode(bytes(content), directory)
    except DamagedFile:
        return
    else:  # a flip in the name of the digest: the file counts as one of an older version
        assert b'\\"file_digest\\"' not in content
        assert (after.step, after.draw_ids, after.samples[0].rollout) == (before.step, before.draw_ids, 3)
        assert_same(before.samples[0].sample, after.samples[0].sample)
