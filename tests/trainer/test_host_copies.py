"""Host memory of checkpoints and published versions, planned from sizes alone."""

import pytest

from headrace.config.trainer import AdamWConfig, MuonConfig, SgdConfig
from headrace.trainer.host_copies import BUCKET_BYTES, STREAM_BUCKETS, checkpoint_bytes, save_bytes


@pytest.mark.parametrize(
    ("optim", "expected"),
    [(AdamWConfig(), 12), (MuonConfig(), 12), (SgdConfig(), 4), (SgdConfig(momentum=0.9), 8)],
)
def test_a_checkpoint_has_parameters_and_state_in_float32(optim: AdamWConfig, expected: int):
    assert checkpoint_bytes(10, optim) == 10 * expected


@pytest.mark.parametrize(
    ("size", "free", "ranks", "buckets"),
    [
        (3 * BUCKET_BYTES, 4 * BUCKET_BYTES, 1, 3),
        (3 * BUCKET_BYTES - 1, 4 * BUCKET_BYTES, 1, 3),
        (100 * BUCKET_BYTES, 100 * BUCKET_BYTES, 1, STREAM_BUCKETS),
        (100 * BUCKET_BYTES, 100 * BUCKET_BYTES, 2, 2 * STREAM_BUCKETS),
        (3 * BUCKET_BYTES, BUCKET_BYTES, 1, 3),
    ],
    ids=["one copy", "a part of a bucket", "streamed", "streamed by two ranks", "smaller than the buckets of a stream"],
)
def test_saving_takes_one_copy_or_a_few_buckets(size: int, free: int, ranks: int, buckets: int):
    assert save_bytes(size, free, ranks) == buckets * BUCKET_BYTES
