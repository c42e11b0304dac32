"""The plan of memory and disk: by hand for well-known shapes on well-known machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config.sft import SftConfig
from headrace.errors import BadInput
from headrace.inference.model_shape import LayerSizes, ModelShape
from headrace.launch.hosts.base import Host
from headrace.launch.placement import Place, Placement
from headrace.launch.resource_plan import (
    AnyRun,
    Budget,
    Machine,
    ResourcePlan,
    ResourcePlanner,
    gib,
    kept_checkpoints,
)
from headrace.launch.resources import find_refusal, find_solutions, occupied_bytes
from headrace.runfile.run import RunConfig
from tests.inference.shapes import QWEN_05B, QWEN_4B, QWEN_8B, QWEN_14B, QWEN_30B_A3B, QWEN_32B

GIB = 1 << 30
H200 = Machine(gpu_memory=143_771 << 20, host_memory=128 * GIB, free_host_memory=124 * GIB, free_disk=1000 * GIB)
LAPTOP = Machine(None, host_memory=16 * GIB, free_host_memory=12 * GIB, free_disk=100 * GIB)


def placed(ranks: int, gpus: tuple[str, ...], servers: tuple[tuple[str, ...], ...]) -> Placement:
    """The placement of a trainer with these GPUs, and of servers with theirs, on one host."""
    samplers = [Place(f"inference-{number}", "inference", "h", gpus) for number, gpus in enumerate(servers)]
    return Placement((Host("h"),), (*samplers, Place("trainer", "trainer", "h", gpus, ranks)))


ONE_GPU = placed(1, ("0",), (("0",),))
NO_GPU = placed(1, (), ((),))
TINY = ModelShape(LayerSizes(64, 2, 4, 2, 16, 128, 300), 100_000)


def rl(trainer: dict[str, Any] | None = None, *, max_steps: int = 10, **sections: Any) -> RunConfig:
    orchestrator = {"train": {"env": [{"id": "reverse-text"}]}, **sections.pop("orchestrator", {})}
    shared = {"output_dir": "run", "max_steps": max_steps, "seq_len": 1024, "model": {"name": "base"}}
    return RunConfig.model_validate({**shared, "trainer": trainer or {}, "orchestrator": orchestrator, **sections})


def planned(config: AnyRun, shape: ModelShape, machine: Machine = H200, placement: Placement = ONE_GPU) -> ResourcePlan:
    sharing = "alternate" if placement.shares_gpu else None
    return ResourcePlanner(config, shape, machine, placement, sharing).plan()


def refusal(
    config: AnyRun, shape: ModelShape, machine: Machine = H200, placement: Placement = ONE_GPU
) -> BadInput | None:
    return find_refusal(config, lambda changed: planned(changed, shape, machine, placement))


def budget(plan: ResourcePlan, beginning: str) -> Budget:
    return next(budget for budget in plan.budgets if budget.resource.startswith(beginning))


def size(plan: ResourcePlan, beginning: str, part: str) -> float:
    """The size of a part in bytes."""
    return sum(each.size for each in budget(plan, beginning).parts if each.name == part)


def test_the_tensors_of_a_step_on_one_gpu() -> None:
    plan, count = planned(rl(), QWEN_4B), QWEN_4B.parameters
    sizes = {part.name: part.size for part in budget(plan, "GPU memory in a training step").parts}
    assert sizes["parameters"] == sizes["gradients"] == 4 * count
    assert sizes["optimizer"] == 8 * count
    assert sizes["published copy"] == sizes["engine's weights"] == 2 * count
    assert budget(plan, "GPU memory in").needed <= H200.gpu_memory  # activations are chosen so


def test_offloaded_state_moves_from_the_gpu_to_the_host() -> None:
    plan, count = planned(rl({"optim": {"offload_state": True}}), QWEN_8B), QWEN_8B.parameters
    assert size(plan, "GPU memory in", "optimizer") == 0
    assert size(plan, "host memory", "optimizer") == 8 * count


def test_published_versions_are_in_host_memory_or_on_disk() -> None:
    linked, files = (planned(rl({"weights": {"transport": each}}), QWEN_4B) for each in ("auto", "files"))
    version = 2 * QWEN_4B.parameters
    assert (size(linked, "host memory", "published versions"), size(files, "host memory", "published versions")) == (
        2 * version,
        0,
    )
    assert (size(linked, "disk", "published versions"), size(files, "disk", "published versions")) == (
        version,  # the last one
        3 * version,
    )


def test_a_run_directory_in_memory_counts_as_host_memory() -> None:
    in_memory = planned(rl(), QWEN_4B, replace(H200, disk_is_memory=True))
    assert size(in_memory, "host memory", "run directory") == budget(in_memory, "disk").needed
    assert size(planned(rl(), QWEN_4B), "host memory", "run directory") == 0


def test_an_adapter_has_a_narrow_base_and_small_checkpoints() -> None:
    plan = planned(rl({"lora": {"r": 16}}), QWEN_14B)
    adapter = QWEN_14B.adapter_parameters(16)
    assert size(plan, "GPU memory in", "parameters") == 2 * QWEN_14B.parameters + 4 * adapter
    assert size(plan, "GPU memory in", "optimizer") == 8 * adapter
    assert size(plan, "disk", "1 checkpoint") == 12 * adapter


def test_ranks_share_the_tensors_of_a_trainer_with_gpus_of_its_own() -> None:
    placement = placed(2, ("1", "2"), (("0",),))
    plan = planned(rl(), QWEN_8B, placement=placement)
    assert size(plan, "GPU memory in", "optimizer") == 8 * QWEN_8B.parameters // 2
    assert size(plan, "GPU memory in", "engine's weights") == 0
    assert size(plan, "GPU memory while", "engine's weights") == 2 * QWEN_8B.parameters
    assert size(plan, "GPU memory while", "optimizer") == 0


def test_on_a_cpu_everything_is_in_host_memory() -> None:
    plan, count = planned(rl(), QWEN_05B, LAPTOP, NO_GPU), QWEN_05B.parameters
    assert {part.name: part.size for part in budget(plan, "host memory").parts if part.is_certain} == {
        "parameters": 4 * count,
        "optimizer": 8 * count,
        "gradients": 4 * count,
        "engine's weights": 4 * count,
    }
    assert plan.max_running is None
    assert not any(each.resource.startswith("GPU") for each in plan.budgets)


@pytest.mark.parametrize(
    ("config", "shape", "machine", "placement"),
    [
        (rl(), QWEN_4B, H200, ONE_GPU),
        (rl({"optim": {"offload_state": True}}), QWEN_8B, H200, ONE_GPU),
        (rl({"lora": {}}), QWEN_14B, H200, ONE_GPU),
        (rl({"lora": {}}), QWEN_32B, H200, ONE_GPU),
        (rl(), TINY, Machine(None, 2 * GIB, 0, GIB, GIB), NO_GPU),
    ],
    ids=["4B", "8B offloaded", "14B adapter", "32B adapter", "tiny"],
)
def test_what_fits_is_not_refused(config: RunConfig, shape: ModelShape, machine: Machine, placement: Placement) -> None:
    assert refusal(config, shape, machine, placement) is None


def test_a_gpu_that_is_too_small_is_refused_with_the_changes_that_help() -> None:
    found = refusal(rl(), QWEN_8B)
    assert found is not None
    assert (found.key, found.value) == ("trainer.optim.state_bits", 32)
    for words in ("trainer.optim.state_bits = 8", "trainer.optim.offload_state = true", "[trainer.lora]"):
        assert words in str(found.fix)
    for changed in ({"optim": {"state_bits": 8}}, {"optim": {"offload_state": True}}, {"lora": {}}):
        assert refusal(rl(changed), QWEN_8B) is None


def test_checkpoints_that_do_not_fit_the_disk_are_refused_with_fewer_of_them() -> None:
    checkpoint = 12 * QWEN_05B.parameters
    machine = Machine(H200.gpu_memory, H200.host_memory, free_disk=int(2.5 * checkpoint))
    found = refusal(rl({"ckpt": {"interval": 2}}), QWEN_05B, machine)
    assert found is not None
    assert found.key == "trainer.ckpt.keep_last"
    assert refusal(rl({"ckpt": {"interval": 2, "keep_last": 1}}), QWEN_05B, machine) is None


def test_an_adapter_without_room_for_the_merged_model_is_saved_alone() -> None:
    machine = Machine(H200.gpu_memory, H200.host_memory, free_disk=60 * GIB)
    found = refusal(rl({"lora": {}}), QWEN_32B, machine)
    assert found is not None
    assert (found.key, found.value) == ("trainer.lora.save_merged", True)
    assert refusal(rl({"lora": {"save_merged": False}}), QWEN_32B, machine) is None


def test_changes_are_combined_where_one_is_not_enough() -> None:
    """8 billion parameters with 13 bytes of disk for each, where one checkpoint takes 8."""
    machine = Machine(H200.gpu_memory, H200.host_memory, free_disk=13 * QWEN_8B.parameters)
    config = rl({"ckpt": {"interval": 2}, "optim": {"type": "sgd", "momentum": 0.9}})
    for solution in (found := find_solutions(config, lambda changed: planned(changed, QWEN_8B, machine).fits)):
        assert len(solution) == len(found[0])
        changed: AnyRun = config
        for change in solution:
            changed = change.apply(changed)
        assert refusal(changed, QWEN_8B, machine) is None
    assert found


def test_a_model_that_fits_in_no_way_is_refused_by_its_name() -> None:
    found = refusal(rl(), QWEN_32B, LAPTOP, NO_GPU)
    assert found is not None
    assert (found.key, found.value) == ("model.name", "base")


def test_a_longest_request_that_the_kv_cache_cannot_hold_is_refused() -> None:
    config = rl(inference={"kv_cache_gb": 0.1, "max_model_len": 8192})
    [problem] = planned(config, QWEN_4B).problems
    assert (problem.key, problem.value) == ("inference.max_model_len", 8192)
    assert refusal(config, QWEN_4B) is not None


def test_swap_counts_before_a_run_is_refused() -> None:
    shape, needed = QWEN_05B, 20 * QWEN_05B.parameters
    short = Machine(None, needed - GIB, 0)
    assert refusal(rl(), shape, short, NO_GPU) is not None
    assert refusal(rl(), shape, Machine(None, needed - GIB, 2 * GIB), NO_GPU) is None


@pytest.mark.parametrize(
    ("orchestrator", "running"),
    [
        ({"batch_size": 128}, 256),
        ({"batch_size": 256}, 256),  # 1.5 times 256 in flight are within two batches, 1.5 times 512 are not
        ({"batch_size": 512}, 512),
        ({"batch_size": 128, "max_inflight_rollouts": 384}, 512),
        ({"batch_size": 4096}, 1024),
        ({"batch_size": 1024, "max_async_level": 0}, 512),
    ],
)
def test_the_slots_of_an_engine_follow_from_the_requests_in_flight(orchestrator: dict[str, int], running: int) -> None:
    assert planned(rl(orchestrator=orchestrator), QWEN_05B).max_running == running


def test_configured_slots_stay() -> None:
    assert planned(rl(inference={"max_running": 7}), QWEN_05B).max_running == 7


@pytest.mark.parametrize(
    ("ckpt", "expected"),
    [
        ({"interval": 50}, (1, 1)),  # only the last one
        ({"interval": 5}, (2, 2)),
        ({"interval": 3, "keep_last": 2}, (3, 2)),
        ({"interval": 3, "keep_last": 1}, (2, 1)),
        ({"interval": 1, "keep_last": 1, "permanent_interval": 5}, (3, 2)),
    ],
)
def test_how_many_checkpoints_are_on_disk(ckpt: dict[str, int], expected: tuple[int, int]) -> None:
    """In a run of 10 steps: while the last is written, and at the end."""
    assert kept_checkpoints(rl({"ckpt": ckpt}).trainer) == expected


def test_an_sft_run_without_evaluation_publishes_nothing() -> None:
    shared = {"output_dir": "run", "max_steps": 3, "seq_len": 64, "model": {"name": "base"}}
    config = SftConfig.model_validate({**shared, "data": {"env": "reverse-text"}})
    plan = planned(config, QWEN_05B, placement=placed(1, ("0",), ()))
    assert {part.name for part in budget(plan, "disk").parts if part.size} == {"1 checkpoint", "final model"}
    found = refusal(config, QWEN_05B, Machine(None, 4 * GIB), placed(1, (), ()))
    assert found is not None
    assert found.key == "lora"


def test_what_a_run_occupies_counts_linked_files_once(tmp_path: Path) -> None:
    first, second = tmp_path / "checkpoints/step-1/a", tmp_path / "checkpoints/permanent/step-1/a"
    for path in (first, second):
        path.parent.mkdir(parents=True)
    first.write_bytes(b"1" * 1000)
    second.hardlink_to(first)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "b").write_bytes(b"1" * 10)
    (tmp_path / "metrics.jsonl").write_bytes(b"1" * 10)
    assert occupied_bytes(tmp_path) == 1010


@pytest.mark.parametrize("experts", [False, True])
def test_a_server_of_several_gpus_has_the_weights_of_one_copy_on_each_group(experts: bool) -> None:
    vllm = {"tensor_parallel_size": 2, "data_parallel_size": 2, "expert_parallel": experts}
    config = rl({"lora": {}}, inference={"engine": "vllm", "vllm": vllm})
    placement = placed(1, ("0",), (("1", "2", "3", "4"),))
    found = size(planned(config, QWEN_30B_A3B, placement=placement), "GPU memory while sampling", "engine's weights")
    divided = 48 * 128 * 3 * 2048 * 768 if experts else 0  # experts over four GPUs, the rest over the two of a copy
    assert found == 2 * ((QWEN_30B_A3B.parameters - divided) // 2 + divided // 4)


@pytest.mark.parametrize(("size", "text"), [(140.4 * 2**30, "140.4"), (0.06 * 2**30, "0.1"), (6 << 20, "0.006")])
def test_sizes_of_tiny_models_are_told_apart(size: float, text: str):
    assert gib(int(size)) == text
