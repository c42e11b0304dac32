"""Cost of the device lock on a shared GPU: releasing and restoring memory, and a hand-over under load.

    python -m benchmarks.inference.gpu_device_lock

First how long it takes to give memory of several sizes back to the driver and to take it again, zeros included. Then an
engine of Qwen3-0.6B's sizes (random weights) decodes 256 requests while this process asks for the GPU as a trainer
does: how long it waits for the lock, with the cache resident and released, and how long after its release the next
tokens come.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.inference.embedded.cuda.kv_storage import DeviceMemory
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.thread import EngineThread
from headrace.inference.schema import SamplingParams
from headrace.transport.lock import DeviceLock

GIB = 1 << 30
SIZES = (1, 10, 40, 80)
HAND_OVERS = 5
REQUESTS = 256
HOLD_S = 0.2
"""Seconds for which the lock is held; nothing is computed meanwhile."""


def main() -> None:
    print("memory   given back   taken again")
    for size in SIZES:
        _attempt(f"{size} GiB", lambda size=size: _memory(size * GIB))
    print(f"\nms, medians of {HAND_OVERS}       wait for the lock   from its release to new tokens")
    with tempfile.TemporaryDirectory() as folder:
        _attempt("hand-overs", lambda: _hand_overs(Path(folder)))


def _attempt(what: str, measure: Callable[[], None]) -> None:
    try:
        measure()
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}", flush=True)


def _memory(size: int) -> None:
    memory = DeviceMemory(size, torch.device("cuda"))
    released, restored = [], []
    for _ in range(HAND_OVERS):
        released.append(_milliseconds(memory.release))
        restored.append(_milliseconds(memory.restore))
    given, taken = statistics.median(released), statistics.median(restored)
    print(f"{size / GIB:3.0f} GiB {given:9.1f} ms {taken:10.1f} ms", flush=True)


def _hand_overs(folder: Path) -> None:
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    own = DeviceLock(folder, trainer=False)
    assert own.try_acquire()
    thread = EngineThread(Engine(model, max_model_len=4096, max_running=REQUESTS, kv_blocks=30_000), own)
    trainer = DeviceLock(folder, trainer=True)
    for number in range(REQUESTS):
        thread.submit([number] * 256, SamplingParams(max_tokens=3800, ignore_eos=True))
    _until(lambda: thread.state().tokens_sampled > 20 * REQUESTS)
    for name, memory in (("cache resident", 0), ("cache released", None)):
        waits, resumed = [], []
        for _ in range(HAND_OVERS):
            trainer.request_memory(memory)
            waits.append(_milliseconds(lambda: _until(trainer.try_acquire)))
            sampled = thread.state().tokens_sampled
            time.sleep(HOLD_S)
            trainer.release()
            goal = sampled + REQUESTS
            resumed.append(_milliseconds(lambda goal=goal: _until(lambda: thread.state().tokens_sampled >= goal)))
            time.sleep(HOLD_S)
        print(f"{name:24}{statistics.median(waits):12.1f}{statistics.median(resumed):28.1f}", flush=True)
    thread.stop()


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.0005)


def _milliseconds(function: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
