"""One GPU for trainer and engine: memory that is released and restored at its address, and whole runs."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.inference.embedded.cuda.kv_storage import DeviceMemory, OutOfDeviceMemory
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.schema import SamplingParams
from headrace.observe.metrics import read_metrics
from headrace.transport.lock import DeviceLock
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import finish, start, write_run_file

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(120),
]
GIB = 1 << 30


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def memory() -> DeviceMemory:
    return DeviceMemory(GIB + 12345, torch.device("cuda"))


def test_released_memory_is_restored_at_the_same_address_as_zeros(memory: DeviceMemory) -> None:
    keys = memory.tensor(torch.bfloat16, (4, 1000, 128))
    values = memory.tensor(torch.bfloat16, (4, 1000, 128), offset=4 * 1000 * 128 * 2)
    keys.fill_(1.5)
    values.fill_(2.5)
    assert keys.unique().tolist() == [1.5] and values.unique().tolist() == [2.5]
    address, taken = keys.data_ptr(), free()
    memory.release()
    memory.release()
    assert not memory.is_mapped
    assert free() - taken >= GIB
    with pytest.raises(RuntimeError, match="restore"):
        memory.tensor(torch.uint8, (1,))
    other = torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")  # of another owner meanwhile
    memory.restore()
    memory.restore()
    assert memory.is_mapped and keys.data_ptr() == address == memory.tensor(torch.bfloat16, (1,)).data_ptr()
    assert keys.abs().max().item() == values.abs().max().item() == 0
    keys.fill_(3)
    assert keys.float().sum().item() == 3 * 4 * 1000 * 128
    del other


def test_a_graph_over_it_replays_after_release_and_restore(memory: DeviceMemory) -> None:
    cells = memory.tensor(torch.float32, (1024, 1024))
    row = torch.arange(1024, dtype=torch.float32, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cells.add_(row)
    torch.cuda.synchronize()
    cells.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cells.add_(row)
        total = cells.sum()
    for _ in range(2):
        graph.replay()
    assert total.item() == 2 * 1024 * row.sum().item()
    memory.release()
    memory.restore()
    graph.replay()
    assert total.item() == 1024 * row.sum().item()


def test_too_much_memory_is_refused_and_may_be_requested_again(memory: DeviceMemory) -> None:
    before = free()
    with pytest.raises(OutOfDeviceMemory, match="GiB"):
        DeviceMemory(before + 100 * GIB, torch.device("cuda"))
    gc.collect()
    assert abs(free() - before) < GIB // 4
    memory.release()
    hog = DeviceMemory(free() - GIB // 2, torch.device("cuda"))
    with pytest.raises(OutOfDeviceMemory):
        memory.restore()
    assert not memory.is_mapped
    hog.release()
    memory.restore()
    assert memory.tensor(torch.uint8, (GIB,)).max().item() == 0


def test_it_is_freed_with_its_last_tensor() -> None:
    before = free()
    memory = DeviceMemory(2 * GIB, torch.device("cuda"))
    tensor = memory.tensor(torch.int16, (GIB,))
    del memory
    gc.collect()
    tensor[-1] = 7
    assert tensor[-1].item() == 7 and before - free() >= 2 * GIB
    del tensor
    gc.collect()
    assert before - free() < GIB // 4


def test_bounds_are_checked(memory: DeviceMemory) -> None:
    with pytest.raises(ValueError, match="not within"):
        memory.tensor(torch.uint8, (GIB,), offset=GIB)
    with pytest.raises(ValueError, match="0 bytes"):
        DeviceMemory(0, torch.device("cuda"))


PEAK = """
import sys, torch
from pathlib import Path
from headrace.observe.status import Status
from headrace.trainer.device_lock import TrainerDeviceLock

directory, size = Path(sys.argv[1]), int(sys.argv[2])
status = Status(directory / "status", "trainer")
lock = TrainerDeviceLock(directory / "turns", torch.device("cuda"), status)
held = []
for step in range(3):
    with lock.hold(lambda: False):
        activations = torch.ones(size, dtype=torch.uint8, device="cuda")
        held.append(activations.sum(dtype=torch.int64).item() == size)
        del activations
print(held)
status.close("done")
"""


@pytest.mark.timeout(180)
def test_a_trainer_gets_the_memory_of_the_cache_for_its_steps(tmp_path: Path) -> None:
    """More than is free as long as the engine, in another process, has its cache."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=256,
    )
    model = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).eval()
    block = 16 * 2 * 28 * 8 * 128 * 2
    engine = Engine(model, max_model_len=128, max_running=8, kv_blocks=(free() - 8 * GIB) // block, compile=False)
    assert engine.runner.cache_bytes > 0
    lock = DeviceLock(tmp_path / "turns", trainer=False)
    assert lock.try_acquire()
    thread = EngineThread(engine, lock)
    try:
        request = thread.submit([5, 6, 7], SamplingParams(max_tokens=100, ignore_eos=True))
        program = [sys.executable, "-c", PEAK, str(tmp_path), str(free() + 4 * GIB)]
        trainer = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
        assert trainer.stdout.strip() == "[True, True, True]", trainer.stderr
        assert len(request.future.result(timeout=60).token_ids) == 100
        late = thread.submit([5], SamplingParams(max_tokens=8, ignore_eos=True))
        assert len(late.future.result(timeout=60).token_ids) == 8
        assert thread.state().hand_overs == 3 and thread.state().cache_releases >= 1
    finally:
        thread.stop()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("sharing", ["alternate", "overlap"])
def test_a_run_on_one_gpu_needs_no_more_than_its_file(tmp_path: Path, tiny_model: Path, sharing: str) -> None:
    code, output = finish(start("rl", write_run_file(tmp_path, tiny_model), "--launch.sharing", sharing), timeout=300)
    run = RunDir(tmp_path / "run")
    logs = "\n".join(path.read_text()[-3000:] for path in run.logs.glob("*.log"))
    assert code == 0, output + logs
    steps = [record for record in read_metrics(run.metrics) if record["process"] == "trainer" and "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert all(("time/wait_for_turn" in record) == (sharing == "alternate") for record in steps)
