"""What each vLLM worker does before it touches its model; `tests/vllm` has the rest, with a real one."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.inference.vllm.worker import Fetcher
from headrace.inference.weights.reading import WeightsError
from headrace.rollout.version import Version
from headrace.transport.weights import WeightStore, read_marker

V1, V2 = Version(0, 1), Version(0, 2)
NORM = "model.norm.weight"
Publish = Callable[[Any, Version], Path]
MakeModel = Callable[[int], Any]


@pytest.fixture
def fetcher(model_directory: Path) -> Fetcher:
    return Fetcher(torch.device("cpu"), model_directory, torch.float32, tied=True)


def republish(directory: Path, target: Path, **changes: torch.Tensor | None) -> Path:
    """The same version with other tensors; None takes one away."""

    def write(draft: Path) -> None:
        tensors = {**load_file(directory / "model.safetensors"), **changes}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, draft / "model.safetensors")

    store = WeightStore(target)
    store.publish(V1, write)
    return store.path(V1)


def wait_for(fetcher: Fetcher, directory: Path) -> None:
    while not fetcher.has(directory, V1):
        time.sleep(0.005)


def test_a_version_that_was_begun_is_taken_though_its_files_are_gone(
    make_model: MakeModel, publish: Publish, fetcher: Fetcher
) -> None:
    directory = publish(make_model(1), V1)
    checksum = read_marker(directory).checksum
    assert not fetcher.has(directory, V1)
    fetcher.begin(directory, V1)
    wait_for(fetcher, directory)
    assert not fetcher.has(directory, V2)
    shutil.rmtree(directory)
    published = fetcher.take(directory, V1)
    assert published.checksum == checksum
    assert torch.equal(published.tensors[NORM], make_model(1).model.norm.weight)
    with pytest.raises(WeightsError, match=r"COMPLETE\.json"):  # handed out once
        fetcher.take(directory, V1)


def test_a_failed_fetch_is_reported_before_anything_is_loaded(fetcher: Fetcher, tmp_path: Path) -> None:
    fetcher.begin(tmp_path, V1)
    with pytest.raises(WeightsError, match=r"COMPLETE\.json"):
        wait_for(fetcher, tmp_path)


def test_who_waits_for_a_version_gets_it_or_hears_why_not(
    make_model: MakeModel, publish: Publish, fetcher: Fetcher, tmp_path: Path
) -> None:
    directory = publish(make_model(1), V1)
    with pytest.raises(WeightsError, match="0-1"):
        fetcher.wait(directory, V1, 10)
    fetcher.begin(directory, V1)
    fetcher.wait(directory, V1, 10)
    assert fetcher.has(directory, V1)
    fetcher.begin(tmp_path / "nowhere", V1)
    with pytest.raises(WeightsError, match=r"COMPLETE\.json"):
        fetcher.wait(tmp_path / "nowhere", V1, 10)


def test_another_version_than_the_one_begun_is_fetched_when_it_is_taken(
    make_model: MakeModel, publish: Publish, fetcher: Fetcher
) -> None:
    fetcher.begin(publish(make_model(1), V1), V1)
    assert fetcher.take(publish(make_model(2), V2), V2).version == V2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": torch.ones(1)}, "extra"),
        ({NORM: None}, NORM),
        ({NORM: torch.ones(7)}, rf"{NORM}.*\[7\].*\[32\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    make_model: MakeModel, publish: Publish, fetcher: Fetcher, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    directory = republish(publish(make_model(1), V1), tmp_path / "edited", **changes)
    with pytest.raises(WeightsError, match=message):
        fetcher.take(directory, V1)


def test_a_tied_head_may_be_there_or_not(
    make_model: MakeModel, publish: Publish, fetcher: Fetcher, tmp_path: Path
) -> None:
    head = make_model(1).lm_head.weight.detach().clone()
    directory = republish(publish(make_model(1), V1), tmp_path / "edited", **{"lm_head.weight": head})
    assert "lm_head.weight" in fetcher.take(directory, V1).tensors
