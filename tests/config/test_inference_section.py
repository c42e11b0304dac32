"""What `[inference]` derives from the engine that it names."""

from __future__ import annotations

import pytest

from headrace.config.inference import InferenceConfig, VllmConfig
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from tests.config.run_files import minimal


def test_the_embedded_engine_takes_one_gpu_and_measures_its_memory_itself() -> None:
    config = InferenceConfig(vllm=VllmConfig(tensor_parallel_size=2, gpu_memory_utilization=0.5))
    assert config.gpus_per_server == 1
    assert config.extra_start_timeout_s == 0
    assert config.memory_share(1) is None


def test_a_vllm_server_takes_a_gpu_for_each_shard_of_each_replica() -> None:
    config = InferenceConfig(engine="vllm", vllm=VllmConfig(tensor_parallel_size=2, data_parallel_size=3))
    assert config.gpus_per_server == 6
    assert config.extra_start_timeout_s == config.vllm.start_timeout


def test_vllm_servers_on_the_trainers_gpu_divide_their_share_of_its_memory() -> None:
    assert InferenceConfig(engine="vllm").memory_share(2) == 0.2
    assert InferenceConfig(engine="vllm", vllm=VllmConfig(gpu_memory_utilization=0.3)).memory_share(2) == 0.3


@pytest.mark.parametrize("key", ["speculative_tokens", "max_step_tokens"])
def test_a_setting_of_the_embedded_engine_gets_a_notice_where_vllm_samples(key: str) -> None:
    for engine, count in (("vllm", 1), ("embedded", 0)):
        section = {"engine": engine, key: 32}
        for _, notices in (
            validate(RunConfig, minimal(inference=section), "run.toml"),
            validate(InferenceConfig, {"model": {"name": "a"}, **section}, "inference.toml"),
        ):
            assert [f"{key} = 32" in notice for notice in notices] == [True] * count
