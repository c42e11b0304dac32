"""Memory budgets of trainer and engines on one GPU, by hand, and that the two sides agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.processes import colocated_engines
from headrace.config.sft import SftConfig
from headrace.inference.embedded.loading import cache_budget
from headrace.inference.memory import ColocatedEngines, ColocatedTrainer
from headrace.inference.model_shape import read_shape
from headrace.runfile.run import RunConfig

GIB = 1 << 30


def reserved_gib(engines: ColocatedEngines, total: int = 24, parameters: int = 1) -> float:
    """GiB of a GPU with so many, for a model of so many times 2**30 parameters."""
    return round(engines.reserved_bytes(parameters * GIB, total * GIB) / GIB, 2)


def test_alternating_engines_keep_their_weights_and_overhead() -> None:
    assert reserved_gib(ColocatedEngines(True, 14)) == 2 + 2.25
    assert reserved_gib(ColocatedEngines(True, 14), total=80) == 2 + 80 / 16
    assert reserved_gib(ColocatedEngines(True, 14, servers=2)) == 2 * 4.25
    assert reserved_gib(ColocatedEngines(True, 14, cache_bytes=7 * GIB)) == 4.25  # which it lends


def test_overlapping_engines_keep_their_caches_as_well() -> None:
    assert reserved_gib(ColocatedEngines(False, 10)) == pytest.approx(4.25 + 0.3 * (24 - 4.25 - 10), abs=0.01)
    assert reserved_gib(ColocatedEngines(False, 10, servers=2)) == pytest.approx(8.5 + 0.3 * (24 - 8.5 - 10), abs=0.01)
    assert reserved_gib(ColocatedEngines(False, 18), total=20) == 4.25  # nothing is left
    assert reserved_gib(ColocatedEngines(False, 10, servers=2, cache_bytes=3 * GIB)) == 8.5 + 6


@pytest.mark.parametrize("alternates", [True, False])
def test_engines_with_a_fixed_share_keep_it_at_all_times(alternates: bool) -> None:
    assert reserved_gib(ColocatedEngines(alternates, 14, servers=2, share=0.2)) == 9.6  # .4 of 24


@pytest.mark.parametrize("total", [24, 80, 140])
@pytest.mark.parametrize("servers", [1, 2])
def test_what_an_engine_takes_is_what_the_trainer_leaves_to_it(total: int, servers: int) -> None:
    """The engine has its context and its weights when it chooses the size of its cache, and works with some more."""
    parameters, trainer = GIB // 2, 18.0
    own, working = 2 * parameters + 600 * 2**20, max(3 * GIB // 2, int(0.04 * total * GIB))
    free = total * GIB - own
    cache = cache_budget(free, total * GIB, own, parameters, ColocatedTrainer(None, trainer, servers))
    left = ColocatedEngines(False, trainer, servers).reserved_bytes(parameters, total * GIB)
    assert left - 2 * GIB * servers <= servers * (own + working + cache) <= left + GIB


SHARED: dict[str, Any] = {"output_dir": "run", "max_steps": 3, "seq_len": 64, "model": {"name": "base"}}


def rl_run(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {**SHARED, "orchestrator": {"train": {"env": [{"id": "reverse-text"}]}}, **sections}
    )


def test_colocated_engines_are_described_by_the_run_file() -> None:
    assert colocated_engines(rl_run(), "alternate") == ColocatedEngines(True, 18)
    shared = rl_run(inference={"kv_cache_gb": 2.5}, launch={"inference_servers": 2})
    assert colocated_engines(shared, "overlap") == ColocatedEngines(False, 18, servers=2, cache_bytes=2_500_000_000)
    vllm = rl_run(inference={"engine": "vllm"}, launch={"inference_servers": 2})
    assert colocated_engines(vllm, "alternate") == ColocatedEngines(True, 18, servers=2, share=0.2)
    mine = rl_run(inference={"engine": "vllm", "vllm": {"gpu_memory_utilization": 0.6}})
    assert colocated_engines(mine, "alternate").share == 0.6


def test_a_trainer_that_is_evaluated_leaves_memory_for_it(tmp_path: Path) -> None:
    config = SftConfig.model_validate({**SHARED, "data": {"env": "reverse-text"}, "inference": {"kv_cache_gb": 1}})
    # Without a copy for the engine, which reads files.
    assert colocated_engines(config, "overlap") == ColocatedEngines(False, 16, cache_bytes=10**9)


def test_an_adapter_takes_as_much_as_its_matrices(model_directory: Path) -> None:
    config = rl_run(trainer={"lora": {"r": 4}}, model={"name": str(model_directory)})
    shape = read_shape(model_directory)
    assert shape is not None
    share = shape.adapter_parameters(4) / shape.parameters
    assert colocated_engines(config, "alternate").trainer_bytes_per_parameter == 2 + share * 16
