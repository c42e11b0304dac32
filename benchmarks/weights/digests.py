"""What digests cost: `python -m benchmarks.weights.digests [MB]`. One table, each row with and without them, in ms.

Both are measured in turn, the least of some repetitions counts. A checkpoint of about so many MB is loaded as bare
tensors, by a trainer that resumes, and by a process that starts, imports everything and resumes, which is what a user
waits for: from the page cache, and from the disk, which a resumed run finds (the writer leaves nothing in the cache).
"""

from __future__ import annotations

import gc
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from benchmarks.trainer.checkpoints import allocate_state, make_learner, saved_tensors

from headrace.rollout import batch as batches
from headrace.rollout.batch import Batch, BatchSample, encode_batch, read_batch
from headrace.rollout.types import Rollout, Sample
from headrace.trainer import checkpoint
from headrace.trainer.tensor_files import load_shards, local_shards
from headrace.transport import rollout_files
from headrace.transport.checkpoint_files import read_marker
from headrace.transport.rollout_files import write_rollouts

REPEATS, RESUMES, PROCESSES = 15, 7, 5
SAMPLES, TOKENS = 256, 1024
LAYERS, VOCABULARY = 12, 8192
UNVERIFIED = "unverified"
Work = Callable[[], object]


class Cost(NamedTuple):
    """Milliseconds with and without something."""

    name: str
    with_it: float
    without: float

    def __str__(self) -> str:
        more = (self.with_it - self.without) / self.with_it
        return f"{self.name:66} {self.with_it:10.3f} {self.without:10.3f} {more:8.1%}"


TITLE = f"{'ms':66} {'with':>10} {'without':>10} {'share':>8}"


def compare(name: str, works: tuple[Work, Work], repeats: int, cold: Path | None = None) -> Iterator[Cost]:
    """Measure both in turn: CPU time, that of child processes included, and wall time; `cold` is read from the disk."""
    cpu: tuple[list[float], list[float]] = ([], [])
    wall: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for index, work in enumerate(works):
            if cold is not None:
                with open(cold, "rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start, used = time.perf_counter(), cpu_s()
            work()
            wall[index].append(1e3 * (time.perf_counter() - start))
            cpu[index].append(1e3 * (cpu_s() - used))
            gc.collect()
    yield Cost(f"{name}, CPU time", min(cpu[0]), min(cpu[1]))
    yield Cost(f"{name}, wall time", min(wall[0]), min(wall[1]))


def cpu_s() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def patched(work: Work, module: object, name: str, stand_in: object) -> Work:
    def run() -> None:
        with patch.object(module, name, stand_in):
            work()

    return run


def of_rollouts(directory: Path) -> Iterator[Cost]:
    rng, zeros = np.random.default_rng(0), np.zeros(TOKENS)
    samples = [
        Sample(rng.integers(0, 1000, TOKENS), zeros == 0, rng.normal(size=TOKENS), zeros.astype(int), 8)
        for _ in range(SAMPLES)
    ]
    batch = Batch(1, 0, [BatchSample(sample, "env", index) for index, sample in enumerate(samples)])
    rollouts = [Rollout(env="env", task_key=str(index), samples=[sample]) for index, sample in enumerate(samples)]
    path = directory / "batch"
    path.write_bytes(encode_batch(batch))
    no_digest = lambda *_: 32 * "0"  # noqa: E731
    for name, work, module, part, stand_in in (
        ("encode a batch", partial(encode_batch, batch), batches, "digest_of", no_digest),
        ("read a batch", partial(read_batch, path), batches, "_DIGEST", re.compile(rb"(?!)")),
        (
            "write rollouts",
            partial(write_rollouts, directory, 1, rollouts, []),
            rollout_files,
            "seal_parquet",
            no_digest,
        ),
    ):
        both = work, patched(work, module, part, stand_in)
        yield next(compare(f"{name} of {SAMPLES} x {TOKENS} tokens", both, REPEATS))


def save_checkpoint(directory: Path, size_mb: int) -> dict[str, Any]:
    """Write a model and a checkpoint of it with the state of AdamW, of 12 bytes per parameter; return its tensors."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden = max(1, round(math.sqrt((size_mb << 20) / 12 / (12.5 * LAYERS)) / 128)) * 128
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "head_dim": 64}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128}
    config = Qwen3Config(vocab_size=VOCABULARY, num_hidden_layers=LAYERS, **shape, **heads, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(directory / "model")
    learner = make_learner(directory / "model", directory / "checkpoints", 32)
    allocate_state(learner)
    learner.begin_checkpoint()
    learner.checkpoints.finish(wait=True)
    return saved_tensors(learner)


def resume(directory: Path) -> None:
    make_learner(directory / "model", directory / "checkpoints", 32, "latest")


def without_verification(saved: Any, shards: Any, _: Any) -> None:
    load_shards(saved, shards, {})


def of_checkpoints(directory: Path, size_mb: int) -> Iterator[Cost]:
    shards = local_shards(save_checkpoint(directory, size_mb))
    saved = checkpoint.find_latest(directory / "checkpoints")
    assert saved is not None
    (file,) = saved.rglob("tensors/*.safetensors")
    marker = read_marker(saved)
    size = f"{file.stat().st_size >> 20} MB from the"
    load = partial(load_shards, checkpoint._saved_shards(saved, marker), shards)
    own = partial(resume, directory)
    command = [sys.executable, "-m", "benchmarks.weights.digests", str(directory)]
    process = partial(subprocess.run, check=True, capture_output=True)
    measured: dict[str, tuple[tuple[Work, Work], int]] = {
        "load tensors of": ((partial(load, marker.tensors), partial(load, {})), REPEATS),
        "resume a trainer of": ((own, patched(own, checkpoint, "load_shards", without_verification)), RESUMES),
        "start a process and resume": (
            (partial(process, command), partial(process, [*command, UNVERIFIED])),
            PROCESSES,
        ),
    }
    for name, (both, repeats) in measured.items():
        yield from compare(f"{name} {size} page cache", both, repeats)
    for name, (both, repeats) in measured.items():
        yield from compare(f"{name} {size} disk", both, repeats, file)


def costs(size_mb: int) -> Iterator[Cost]:
    with tempfile.TemporaryDirectory() as scratch:
        yield from of_rollouts(Path(scratch))
        yield from of_checkpoints(Path(scratch), size_mb)


if __name__ == "__main__":
    argument = sys.argv[1] if len(sys.argv) > 1 else "512"
    if not argument.isdecimal():  # a process of the last rows
        work: Work = partial(resume, Path(argument))
        patched(work, checkpoint, "load_shards", without_verification)() if UNVERIFIED in sys.argv else work()
    else:
        print(TITLE)
        for cost in costs(int(argument)):
            print(cost, flush=True)
