"""Versions that leave a trainer, as files or from its memory."""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.inference.weights import file_layout
from headrace.inference.weights.link import WeightsReceiver
from headrace.inference.weights.reading import WeightsUnreachable
from headrace.rollout.version import Version
from headrace.trainer.attention import UnsupportedModel
from headrace.trainer.model import PackedModel
from headrace.trainer.publisher import Publisher
from headrace.transport.digests import DIGESTS
from headrace.transport.weights import WeightStore
from headrace.transport.weights_link import read_manifest
from tests.inference.host_driver import HostDriver, use
from tests.refusals import refused
from tests.trainer.training_samples import ARCHITECTURES, write_random_model

V1, V2, V3 = (Version(0, step) for step in (1, 2, 3))
PROGRAM = Path(__file__).parent / "publisher_program.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("models") / "qwen3", ARCHITECTURES["qwen3"])


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "weights")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def received(store: WeightStore, version: Version) -> dict[str, torch.Tensor]:
    return WeightsReceiver(torch.device("cpu")).receive(store.path(version), version).tensors


def stored(store: WeightStore, version: Version) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(store.path(version).glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first)


def test_the_link_carries_what_the_files_would_hold(directory: Path, store: WeightStore) -> None:
    publisher = Publisher(store, PackedModel(directory, dtype=torch.bfloat16), host="127.0.0.1")
    publisher.publish(V1)
    publisher.publish(V2, lasting=True)
    assert names(store.path(V1)) == [DIGESTS, "COMPLETE.json", "config.json", "generation_config.json", "tensors.json"]
    assert names(store.path(V2)) == [
        *(DIGESTS, "COMPLETE.json", "config.json", "generation_config.json", "model.safetensors")
    ]
    assert (store.path(V1) / "config.json").read_text() == (store.path(V2) / "config.json").read_text()
    assert_same(received(store, V1), stored(store, V2))
    publisher.close()


@pytest.mark.parametrize("name", ["qwen3", "gemma3, sliding and full"])
def test_the_size_of_a_version_is_known_before_it_is_published(name: str, store: WeightStore, tmp_path: Path) -> None:
    model = PackedModel(write_random_model(tmp_path / "model", ARCHITECTURES[name]), dtype=torch.bfloat16)
    publisher = Publisher(store, model, host="127.0.0.1")
    publisher.publish(V1)
    assert publisher._version_bytes() == read_manifest(store.path(V1)).size
    publisher.close()


@pytest.mark.parametrize("lora", [None, {"r": 2, "alpha": 4, "use_rslora": False, "target_modules": "all-linear"}])
def test_memory_for_engines_on_the_gpu_is_taken_before_a_step_is_planned(
    lora: dict[str, Any] | None, directory: Path, store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = HostDriver(tmp_path / "memory")
    use(driver, replace=monkeypatch.setattr)
    model = PackedModel(directory, lora=lora)
    publisher = Publisher(store, model, host="127.0.0.1", shared=True)
    assert "plan" not in vars(model)  # it is made at the first step, for what is free then
    taken = [len(memory) for _, memory, _ in driver.open.values()]
    assert taken == ([1 << 21] if lora is None else [])  # one page, which is enough for it
    publisher.publish(V1)
    assert len(driver.open) == len(taken)
    publisher.close()


def test_without_an_address_there_are_files(directory: Path, store: WeightStore) -> None:
    publisher = Publisher(store, PackedModel(directory))
    publisher.publish(V1)
    assert "model.safetensors" in names(store.path(V1))
    publisher.close()


def test_an_adapter_is_a_file_whatever_the_transport(directory: Path, store: WeightStore) -> None:
    publisher = Publisher(store, PackedModel(directory, lora=LORA), host="127.0.0.1")
    publisher.publish(V1)
    assert names(store.path(V1)) == [DIGESTS, "COMPLETE.json", "adapter_config.json", "adapter_model.safetensors"]


LORA = {"r": 2, "alpha": 4, "use_rslora": False, "target_modules": "all-linear"}


@pytest.mark.parametrize("options", [{}, {"lora": LORA}, {"load": False}], ids=["whole", "adapter", "resumed"])
def test_a_model_is_refused_that_is_stored_in_another_form_than_it_has_in_memory(
    options: dict[str, Any], directory: Path, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PackedModel(directory, **options)
    Publisher(store, model).check_embedded()
    copies = {"model.embed_tokens.weight": torch.ones(2)}
    monkeypatch.setattr(file_layout, "revert_weight_conversion", lambda *_: copies)
    with refused(UnsupportedModel, key="model.name", value=model.directory):
        Publisher(store, model).check_embedded()


def test_a_version_can_be_had_for_as_long_as_its_directory_is_there(directory: Path, store: WeightStore) -> None:
    publisher = Publisher(store, PackedModel(directory), host="127.0.0.1")
    publisher.publish(V1)
    lost = shutil.copytree(store.path(V1), store.directory.parent / "copy")
    for version in (V2, V3):
        publisher.publish(version)
    store.acknowledge(V2)
    publisher.retire(keep_last=1)
    assert store.published() == [V2, V3]
    for version in (V2, V3):
        received(store, version)
    with pytest.raises(WeightsUnreachable, match="0-2, 0-3"):
        WeightsReceiver(torch.device("cpu")).receive(lost, V1)
    publisher.close()
    with pytest.raises(WeightsUnreachable):
        received(store, V3)


@pytest.mark.full
def test_two_ranks_publish_what_they_hold_together(directory: Path, store: WeightStore, tmp_path: Path) -> None:
    over = tmp_path / "over"
    command = [sys.executable, *TORCHRUN, PROGRAM, directory, store.directory, over]
    ranks = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while V2 not in store.published():
        assert ranks.poll() is None, ranks.communicate()[1][-3000:]
        time.sleep(0.05)
    found = received(store, V1)
    over.touch()
    _, errors = ranks.communicate()
    assert ranks.returncode == 0, errors[-3000:]
    assert_same(found, stored(store, V2))
    original = load_file(directory / "model.safetensors")
    assert_same(found, {name: tensor.bfloat16() for name, tensor in original.items()})


def test_versions_older_than_the_acknowledged_one_give_their_memory_to_the_next(
    directory: Path, store: WeightStore
) -> None:
    publisher = Publisher(store, PackedModel(directory), host="127.0.0.1")
    for version in (V1, V2):
        publisher.publish(version)
    store.acknowledge(V2)
    publisher.publish(V3)
    assert_same(received(store, V2), received(store, V3))  # an engine that restarts needs V2
    with pytest.raises(WeightsUnreachable, match="no such version"):
        received(store, V1)
    publisher.close()
