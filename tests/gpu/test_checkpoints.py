"""Checkpoints of tensors on a GPU: copies in the order of its stream, and memory that was pinned ahead."""

from pathlib import Path

import pytest
import torch

from headrace.rollout.version import Version
from headrace.trainer.checkpoint import Checkpoints, TrainState, load_tensors
from headrace.trainer.host_copies import BUCKET_BYTES, STREAM_BUCKETS, pin_ahead
from headrace.trainer.model import PackedModel
from headrace.trainer.publisher import Publisher
from headrace.trainer.ranks import Ranks
from headrace.transport.weights import WeightStore
from tests.trainer.training_samples import ARCHITECTURES, write_random_model

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CUDA = torch.device("cuda")
BUCKETS = 2 * STREAM_BUCKETS
"""More than a stream has."""


def some_tensors() -> dict[str, torch.Tensor]:
    rows = BUCKETS * BUCKET_BYTES // 4 // 3 // 1000
    matrices = {f"model.{number}": torch.randn(rows, 1000, device=CUDA) for number in range(3)}
    return {**matrices, "optimizer.step": torch.tensor(3.0, device=CUDA), "offloaded": torch.randn(1000, 1000)}


@pytest.mark.parametrize("copies", [True, False], ids=["one copy", "streamed"])
def test_what_changes_after_the_beginning_of_a_checkpoint_is_not_in_it(copies: bool, tmp_path: Path):
    tensors = some_tensors()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    checkpoints = Checkpoints(tmp_path, Ranks(), keep_last=1)
    checkpoints.copies_to_host = copies
    checkpoints.begin(tensors, lambda path: path.mkdir(), TrainState(step=1))
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    checkpoints.finish(wait=True)
    load_tensors(tmp_path / "step-00000001", tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def pinned_blocks() -> int:
    return int(torch.cuda.host_memory_stats()["num_host_alloc"])


def test_after_memory_is_pinned_ahead_saving_and_publishing_pin_no_more(tmp_path: Path):
    model = PackedModel(write_random_model(tmp_path / "model", ARCHITECTURES["qwen3"]), Ranks(), dtype=torch.bfloat16)
    publisher = Publisher(WeightStore(tmp_path / "weights"), model, host="127.0.0.1", shared=True)
    checkpoints, tensors = Checkpoints(tmp_path / "checkpoints", Ranks(), keep_last=1), some_tensors()
    copy = checkpoints.plan(sum(tensor.nbytes for tensor in tensors.values()) + 1024, 1 << 40)
    # A version that is published while a checkpoint is written needs a bucket of its own, and so does each before it.
    pin_ahead(copy + 3 * BUCKET_BYTES, CUDA).join()
    before = pinned_blocks()
    for step in (1, 2):
        checkpoints.begin(tensors, lambda path: path.mkdir(), TrainState(step=step))
        publisher.publish(Version(0, step))
    checkpoints.finish(wait=True)
    publisher.close()
    assert pinned_blocks() == before
