"""Checkpoints and publications of the trainer: time that training stops, host memory, speed, and time to resume.

    python -m benchmarks.trainer.checkpoints --model 5m|0.6b|1.7b|4b|8b [--how copy stream torch] [--state-bits 8]

The trainer's own `Learner` with the state of AdamW, of random weights. `copy`: from one copy in host memory; `stream`:
through a few buckets; `torch`: torch.distributed.checkpoint, as until version 0.9, which needs three copies. Every
checkpoint is deleted before the next one, so that the disk needs room for one, and for the model in bfloat16. `stopped`
is the time until training could go on, that of the copies on the GPU included. `memory` is the host memory above that
of the loaded trainer, before anything was pinned, from MemAvailable (without page cache) every 20 ms.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.models import write_qwen3, write_qwen3_5m
from rich.console import Console
from rich.table import Table

from headrace.config.trainer import TrainingConfig
from headrace.inference.weights.buffers import as_bytes
from headrace.machine import free_memory
from headrace.rollout.version import Version
from headrace.trainer import checkpoint
from headrace.trainer.host_copies import PUBLISHED_COPIES, pin_ahead
from headrace.trainer.learner import MODEL_PREFIX, OPTIMIZER_PREFIX, Learner, add_prefix
from headrace.trainer.loss import ce_loss
from headrace.trainer.publisher import Publisher
from headrace.transport.weights import WeightStore

PUBLICATIONS = 5
SAMPLE_INTERVAL_S = 0.02
TORCH_COPIES = 3.2
"""Copies in host memory that torch's writer is given; it kills the process where they do not fit."""


class Row(NamedTuple):
    how: str
    size: int
    stopped: float
    complete: float
    memory: int


def measure(learner: Learner, how: str, free: int) -> Row:
    """Save one checkpoint; `free` is the free host memory that the peak is measured from."""
    directory = learner.checkpoints.directory
    for old in checkpoint.list_complete(directory):
        shutil.rmtree(old)
    save = save_with_torch if how == "torch" else save_with_headrace
    learner.checkpoints.copies_to_host = how == "copy"
    size = sum(tensor.nbytes for tensor in saved_tensors(learner).values())
    synchronize()
    with lowest_free_memory() as lowest:
        start = time.perf_counter()
        finish = save(learner)
        synchronize()
        stopped = time.perf_counter() - start
        finish()
        complete = time.perf_counter() - start
    return Row(how, size, stopped, complete, free - lowest())


def save_with_headrace(learner: Learner) -> Callable[[], Any]:
    learner.begin_checkpoint()
    return lambda: learner.checkpoints.finish(wait=True)


def save_with_torch(learner: Learner) -> Callable[[], Any]:
    import torch.distributed as dist
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import async_save

    target = learner.checkpoints.directory / ".torch"
    shutil.rmtree(target, ignore_errors=True)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    writer = HuggingFaceStorageWriter(str(target), save_distributed=True)
    group = dist.new_group(backend="gloo")
    saving: Any = async_save(saved_tensors(learner), storage_writer=writer, async_stager=stager, process_group=group)

    def finish() -> None:
        saving.result()
        stager.close()
        shutil.rmtree(target)

    return finish


def saved_tensors(learner: Learner) -> dict[str, torch.Tensor]:
    return add_prefix(MODEL_PREFIX, learner.model.trained_tensors()) | add_prefix(
        OPTIMIZER_PREFIX, learner.optimizer.state_tensors()
    )


@contextmanager
def lowest_free_memory() -> Iterator[Callable[[], int]]:
    """Sample the free host memory in a thread; the result is its minimum."""
    found, stop = [free_memory()], threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_INTERVAL_S):
            found.append(free_memory())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield lambda: min(found)
    finally:
        stop.set()
        thread.join()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_learner(model: Path, directory: Path, state_bits: int, resume: str | None = None) -> Learner:
    config = TrainingConfig(
        model={"name": str(model)}, max_steps=10, seq_len=128, compile=False, optim={"state_bits": state_bits}
    )
    return Learner(config, {"ce": ce_loss}, directory, resume)


def allocate_state(learner: Learner) -> None:
    """Take a step without gradients, after which the optimizer has its state."""
    for parameter in learner.optimizer.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    learner.optimizer.step(0.0)


def fingerprint(learner: Learner) -> dict[str, int]:
    return {name: int(as_bytes(tensor).sum(dtype=torch.int64)) for name, tensor in saved_tensors(learner).items()}


def publish(learner: Learner, directory: Path) -> list[float]:
    """Return the seconds of consecutive publications over the link, each acknowledged at once."""
    store = WeightStore(directory / "weights")
    publisher = Publisher(store, learner.model, host="127.0.0.1", shared=torch.cuda.is_available())
    seconds = []
    for step in range(1, PUBLICATIONS + 1):
        synchronize()
        start = time.perf_counter()
        publisher.publish(Version(0, step))
        seconds.append(time.perf_counter() - start)
        store.acknowledge(Version(0, step))
        publisher.retire(1)
    publisher.close()
    return seconds


def pin(size: int, device: torch.device) -> float:
    """Pin memory as a run does before its first step; return the seconds that it takes."""
    start = time.perf_counter()
    if device.type == "cuda":
        pin_ahead(size, device).join()
    return time.perf_counter() - start


def main(size: str, how: list[str], state_bits: int, directory: Path) -> None:
    console = Console(width=120)
    model = directory / "model"
    write_qwen3_5m(model) if size == "5m" else write_qwen3(model, size)
    learner = make_learner(model, directory / "checkpoints", state_bits)
    for file in model.glob("*.safetensors"):
        file.unlink()  # its room on the disk is needed
    allocate_state(learner)
    total = sum(tensor.nbytes for tensor in saved_tensors(learner).values())
    gc.collect()
    free, room = free_memory(), shutil.disk_usage(directory).free
    console.print(f"checkpoint {total / 1e9:.1f} GB, free: host memory {free / 1e9:.1f} GB, disk {room / 1e9:.1f} GB")
    before = fingerprint(learner)
    rows = [measure(learner, each, free) for each in how if each != "copy" and fits(each, total, free, console)]
    if "copy" in how and fits("copy", total, free, console):  # last, since pinned memory is kept
        console.print(f"{total / 1e9:.1f} GB pinned ahead in {pin(total, learner.model.device):.1f} s")
        rows += [measure(learner, "copy", free) for _ in range(2)]
    published = PUBLISHED_COPIES * sum(parameter.numel() for parameter in learner.model.named_parameters().values()) * 2
    pin(published, learner.model.device)
    console.print("publications: " + ", ".join(f"{seconds:.2f} s" for seconds in publish(learner, directory)))
    del learner
    gc.collect()
    torch.cuda.empty_cache()
    start = time.perf_counter()
    resumed = make_learner(model, directory / "checkpoints", state_bits, "latest")
    synchronize()
    resume = time.perf_counter() - start
    table = Table("how", "GB", "stopped s", "GB/s", "complete s", "memory GB", "x size", "resume s")
    for row in rows:
        figures = (row.size / 1e9, row.stopped, row.size / 1e9 / row.stopped, row.complete, row.memory / 1e9)
        table.add_row(row.how, *(f"{f:.2f}" for f in figures), f"{row.memory / row.size:.2f}", f"{resume:.1f}")
    console.print(table)
    console.print("resumed bit for bit" if fingerprint(resumed) == before else "RESUMED DIFFERENTLY")


def fits(how: str, size: int, free: int, console: Console) -> bool:
    copies = {"torch": TORCH_COPIES, "copy": 1.0}.get(how, 0.0)
    if copies * size > free:
        console.print(f"{how}: {copies:g} copies of {size / 1e9:.1f} GB do not fit into {free / 1e9:.1f} GB")
    return copies * size <= free


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure checkpoints and publications of the trainer.")
    parser.add_argument("--model", choices=["5m", "0.6b", "1.7b", "4b", "8b"], default="5m")
    parser.add_argument("--how", nargs="+", choices=["torch", "stream", "copy"], default=["stream", "copy"])
    parser.add_argument("--state-bits", type=int, choices=[8, 32], default=32, help="of each of AdamW's moments")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written (default: a temporary directory)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as work:
        main(arguments.model, arguments.how, arguments.state_bits, Path(work))
