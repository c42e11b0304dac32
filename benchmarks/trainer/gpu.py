"""Whole training steps on one GPU: tokens per second, MFU and peak memory, beside a plain Hugging Face loop.

    python -m benchmarks.trainer.gpu [CASE ...] [--who ours plain]
    python -m benchmarks.trainer.gpu --profile CASE      the kernels of one step, by time
    python -m benchmarks.trainer.gpu --try [NAME ...]    variants side by side (`gpu_variants.py`)

A step is forward, backward, clip and optimizer, with float32 masters and Adam's state on the GPU, over four rows of 16k
tokens (in one case two of 64k) of real loss streams; random weights, new data in every step. Ours is the trainer's own
`TrainStep`, told only how much memory it may take. `peak` is the most memory that torch had allocated at once, from the
building of the model on. MFU and the data: `gpu_cases.py`; the plain loop: `gpu_plain.py`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.models import fill_randomly, qwen3_config
from benchmarks.trainer import gpu_variants
from benchmarks.trainer.gpu_cases import CASES, PEAK, Case, draw
from benchmarks.trainer.gpu_plain import PlainStep

from headrace.rollout.packing import pack
from headrace.rollout.types import Sample
from headrace.trainer.loss import ce_loss
from headrace.trainer.losses import policy_loss
from headrace.trainer.model import PackedModel
from headrace.trainer.optim import Optimizer
from headrace.trainer.step import TrainStep

GIB = 2**30
CHUNK = 4096
WARM_UP = 2
"""Steps that are not measured: they compile."""


def build(case: Case, directory: Path, **settings: Any) -> PackedModel:
    """A model of random weights that no file had to hold."""
    qwen3_config(case.size).save_pretrained(directory)
    model = PackedModel(
        directory,
        dtype=torch.bfloat16,
        load=False,
        longest=case.row,
        lora={"r": 16, "alpha": 32} if case.lora else None,
        **{
            "activation_checkpointing": "auto",
            "compile": True,
            "lm_head_chunk": CHUNK,
            "memory": None if case.limit is None else int(case.limit * GIB),
            **settings,
        },
    )
    fill_randomly(model.module)
    return model


def our_step(model: PackedModel, case: Case) -> Callable[[list[Sample]], None]:
    optimizer = Optimizer(model.named_parameters(), max_grad_norm=1.0)
    step = TrainStep(model, optimizer, {"rl": policy_loss("default"), "ce": ce_loss}, micro_batch_tokens=None)

    def run(samples: list[Sample]) -> None:
        result = step.run(pack(samples, case.row), lr=1e-6)
        assert result is not None and result.grad_norm > 0

    return run


def timed(run: Callable[[list[Sample]], None], samples: list[Sample]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(samples)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(case: Case, who: str, directory: Path) -> str:
    """A line of the table."""
    began = time.perf_counter()
    torch.cuda.reset_peak_memory_stats()
    if who == "ours":
        model = build(case, directory)
        run, steps = our_step(model, case), case.steps
    else:
        run, steps = PlainStep(case).run, case.plain_steps
    for seed in range(WARM_UP if who == "ours" else min(1, steps - 1)):
        run(draw(case, 1000 + seed))
    speeds, shares = [], []
    for seed in range(steps):
        samples = draw(case, seed)
        lengths = [len(sample) for sample in samples]
        taken = timed(run, samples)
        speeds.append(sum(lengths) / taken)
        shares.append(case.operations(lengths) / taken / PEAK)
    peak = torch.cuda.max_memory_allocated() / GIB
    speed = statistics.median(speeds)
    met = speed >= case.target and (case.limit is None or peak <= case.limit)
    plain = f"padded, eager, recompute {'everything' if case.limit else 'nothing'}"
    settings = str(model.plan) if who == "ours" else plain
    bound = "" if case.limit is None else f"<={case.limit:g}"
    return (
        f"{case.name:<14}{who:<6}{speed:>8.0f} ({min(speeds):.0f}-{max(speeds):.0f}){statistics.median(shares):>7.3f}"
        f"{peak:>7.1f} {bound:<5}{case.target:>7.0f} {('yes' if met else 'no') if who == 'ours' else '':<4}"
        f"{time.perf_counter() - began:>5.0f}s  {settings}"
    )


def forget() -> None:
    """What the case before had is free again; compiled programs stay."""
    gc.collect()
    torch.cuda.empty_cache()


def table(names: list[str], whom: list[str], directory: Path) -> None:
    print(f"{'case':<14}{'who':<6}{'tokens/s (spread)':<24}{'MFU':>5}{'GiB':>7}{'target':>13} met  took  settings")
    for name in names:
        for who in whom:
            try:
                print(measure(CASES[name], who, directory), flush=True)
            except Exception as error:
                print(f"{name:<14}{who:<6}failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                if not isinstance(error, torch.cuda.OutOfMemoryError):
                    traceback.print_exc(limit=8)
            forget()


def profile(case: Case, directory: Path) -> None:
    """Where a step's time goes."""
    model = build(case, directory)
    run = our_step(model, case)
    for seed in range(WARM_UP + 1):
        run(draw(case, 1000 + seed))
    samples = draw(case, 0)
    taken = timed(run, samples)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        timed(run, samples)
    kernels = [
        (event.self_device_time_total / 1e3, event.count, event.key)
        for event in profiler.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    busy = sum(milliseconds for milliseconds, _, _ in kernels)
    print(f"\n{case.name}: {taken * 1e3:.0f} ms a step, of which the GPU is busy for {busy:.0f}; {model.plan}")
    for kind, milliseconds in sorted(_by_kind(kernels).items(), key=lambda pair: -pair[1]):
        print(f"  {kind:<14}{milliseconds:>9.1f} ms{milliseconds / busy:>7.1%}")
    for milliseconds, count, name in sorted(kernels, reverse=True)[:25]:
        print(f"{milliseconds:>9.2f} ms{milliseconds / busy:>7.1%}{count:>6}  {name[:150]}")


_KINDS = {
    "attention": ("flash", "sdpa", "fmha", "attention", "cudnn_generated"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "head": ("_score", "_gradient"),
    "fused": ("triton_",),
    "optimizer": ("multi_tensor", "fused_adam", "foreach"),
    "copies": ("memcpy", "memset", "copy"),
}


def _by_kind(kernels: list[tuple[float, int, str]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for milliseconds, _, name in kernels:
        lower = name.lower()
        kind = next((kind for kind, parts in _KINDS.items() if any(part in lower for part in parts)), "other")
        sums[kind] = sums.get(kind, 0.0) + milliseconds
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; none: all")
    parser.add_argument("--who", nargs="+", choices=["ours", "plain"], default=["ours", "plain"])
    parser.add_argument("--profile", nargs="+", metavar="CASE", choices=list(CASES))
    parser.add_argument("--try", dest="variants", nargs="*", choices=list(gpu_variants.VARIANTS))
    arguments = parser.parse_args()
    unknown = [name for name in arguments.cases if name not in CASES]
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; known: {', '.join(CASES)}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as directory:
        if arguments.variants is not None:
            for name in arguments.variants or gpu_variants.VARIANTS:
                gpu_variants.run(name)
                forget()
        elif arguments.profile:
            for name in arguments.profile:
                profile(CASES[name], Path(directory))
                forget()
        else:
            table(arguments.cases or list(CASES), arguments.who, Path(directory))


if __name__ == "__main__":
    main()
