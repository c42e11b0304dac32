"""The cost of digests: `python -m benchmarks.weights.digests [MB]`. One table; each row with and without them.

Both are measured alternately, the least of 15 counts. A checkpoint of so many MB is loaded from the page cache, by CPU
time and by wall time, and from the disk, by wall time. Wall times need idle cores.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from headrace.rollout import batch as batches
from headrace.rollout.batch import Batch, BatchSample, encode_batch, read_batch
from headrace.rollout.types import Rollout, Sample
from headrace.trainer.host_copies import STREAM_BUCKETS
from headrace.trainer.tensor_files import load_shards, local_shards, read_shards, write_shards
from headrace.transport import rollout_files
from headrace.transport.rollout_files import write_rollouts

REPEATS = 15
CHECKPOINT_MB = int(sys.argv[1]) if len(sys.argv) > 1 else 512
TENSOR_MB = 16
SAMPLES, TOKENS = 256, 1024


def no_digest(*_: object) -> str:
    return 32 * "0"


def best_of_both(
    with_digests: Callable[[], object], without: Callable[[], object], clock: Callable[[], float], file: Path | None
) -> tuple[float, float]:
    """Return the least milliseconds of both, measured alternately; `file` is read from the disk each time."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS):
        for work, taken in zip((with_digests, without), times, strict=True):
            if file is not None:
                with open(file, "rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = clock()
            work()
            taken.append(1e3 * (clock() - start))
    return min(times[0]), min(times[1])


def undigested(work: Callable[[], object], module: object, name: str, stand_in: object) -> Callable[[], None]:
    def run() -> None:
        with patch.object(module, name, stand_in):
            work()

    return run


def main() -> None:
    rng = np.random.default_rng(0)
    zeros = np.zeros(TOKENS)
    samples = [
        Sample(rng.integers(0, 1000, TOKENS), zeros == 0, rng.normal(size=TOKENS), zeros.astype(int), 8)
        for _ in range(SAMPLES)
    ]
    batch = Batch(1, 0, [BatchSample(sample, "env", index) for index, sample in enumerate(samples)])
    rollouts = [Rollout(env="env", task_key=str(index), samples=[sample]) for index, sample in enumerate(samples)]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        path = directory / "batch"
        path.write_bytes(encode_batch(batch))
        size = path.stat().st_size / 1e6
        encode, read = (lambda: encode_batch(batch)), (lambda: read_batch(path))
        write = lambda: write_rollouts(directory, 1, rollouts, [])  # noqa: E731
        tensors = {f"model.{n}": torch.zeros(TENSOR_MB << 18) for n in range(CHECKPOINT_MB // TENSOR_MB)}
        file = directory / "shard.safetensors"
        digests = write_shards(file, local_shards(tensors), blocks=STREAM_BUCKETS).finish()
        shards = read_shards(file)
        load = partial(load_shards, shards, local_shards(tensors))
        loads = partial(load, {file.name: digests}), partial(load, {})
        rows = {
            f"encode a batch of {size:.0f} MB": (encode, undigested(encode, batches, "digest_of", no_digest)),
            f"read a batch of {size:.0f} MB": (read, undigested(read, batches, "_DIGEST", re.compile(rb"(?!)"))),
            f"write {SAMPLES} rollouts": (write, undigested(write, rollout_files, "seal_parquet", no_digest)),
            f"load a checkpoint of {CHECKPOINT_MB} MB": loads,
            f"load {CHECKPOINT_MB} MB, wall time": loads,
            f"load {CHECKPOINT_MB} MB from the disk, wall time": loads,
        }
        print(f"{'':40} {'with, ms':>10} {'without, ms':>12} {'difference':>11}")
        for name, both in rows.items():
            clock = time.perf_counter if "wall" in name else time.process_time
            taken, less = best_of_both(*both, clock, file if "disk" in name else None)
            print(f"{name:40} {taken:10.2f} {less:12.2f} {(taken - less) / taken:11.1%}")


if __name__ == "__main__":
    main()
