"""Parts of a training step, measured one way beside another: what decided how the trainer computes on a GPU.

    python -m benchmarks.trainer.gpu --try [head attention products modes narrow]

`head`: the lm-head on 16k tokens, its passes over the logits as torch's operators, compiled, and as kernels of ours;
several sizes of chunks. `attention`: kernels on one sequence and on mixed lengths. `products`: the matrix products
of a layer, apart and joined. `modes`: what each way to recompute takes of time and memory, beside what the plan says.
`narrow`: the whole model in bfloat16, stream between the layers included, instead of autocast.
"""

from __future__ import annotations

import statistics
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.trainer.gpu_cases import CASES, Case, draw
from torch import Tensor

from headrace.trainer import lm_head
from headrace.trainer.attention import packed_attention
from headrace.trainer.lm_head import label_logprobs
from headrace.trainer.memory_plan import MODES
from headrace.trainer.packed_row import Kernel, make_row

DEVICE = torch.device("cuda")
TOKENS, HIDDEN, VOCABULARY = 16384, 1024, 151_936
GIB = 2**30


def run(name: str) -> None:
    print(f"\n--- {name}", flush=True)
    for title, variant in VARIANTS[name]():
        try:
            print(f"{title:<58}{variant()}", flush=True)
        except Exception as error:
            print(f"{title:<58}failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
            if not isinstance(error, torch.cuda.OutOfMemoryError):
                traceback.print_exc(limit=-3)
        torch.cuda.empty_cache()


Variants = list[tuple[str, Callable[[], str]]]


def milliseconds(function: Callable[[], Any], times: int = 7) -> float:
    """The median, after two that do not count."""
    taken = []
    for _ in range(times + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken[2:])


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def head() -> Variants:
    torch.manual_seed(0)
    hidden = random(TOKENS, HIDDEN).requires_grad_()
    weight = torch.nn.Parameter(random(VOCABULARY, HIDDEN, scale=0.02, dtype=torch.float32))
    labels = torch.randint(0, VOCABULARY, (TOKENS,), device=DEVICE)
    temperatures, direction = torch.ones(TOKENS, device=DEVICE), torch.randn(TOKENS, device=DEVICE)
    rows = torch.arange(0, TOKENS, 16, device=DEVICE)
    exact = (hidden.detach()[rows].float() @ weight.detach().bfloat16().float().t()).log_softmax(-1)
    exact = exact.gather(-1, labels[rows, None])[:, 0]
    kernels = lm_head._passes("cuda", torch.float32)
    eager = lm_head._Passes(lm_head._score, lm_head._gradient)
    compiled = lm_head._Passes(torch.compile(lm_head._score), torch.compile(lm_head._gradient))

    def measured(passes: Any, chunk: int, in_place: bool = True, is_frozen: bool = False) -> str:
        original, lm_head._passes = lm_head._passes, lambda *_: passes  # type: ignore[assignment]
        weight.requires_grad_(not is_frozen)
        scored: dict[str, Tensor] = {}

        def forward() -> None:
            scored["logprobs"], _ = label_logprobs(
                hidden, weight, labels, temperatures, chunk, in_place=in_place and not is_frozen
            )

        def both() -> None:
            forward()
            scored["logprobs"].backward(direction)  # type: ignore[no-untyped-call]

        try:
            torch.cuda.reset_peak_memory_stats()
            first, all_of_it = milliseconds(forward), milliseconds(both)
            error = float((scored["logprobs"].detach()[rows] - exact).abs().max())
            peak = torch.cuda.max_memory_allocated() / GIB
            return f"{first:>8.1f} forward{all_of_it:>8.1f} ms both{peak:>7.2f} GiB, error {error:.3f}"
        finally:
            lm_head._passes = original
            scored.clear()
            weight.grad = hidden.grad = None

    return [
        ("adds products to float32?", lambda: f"{lm_head._supports_wide_addmm(DEVICE, torch.bfloat16)}"),
        ("eager, 4096", partial(measured, eager, 4096)),
        ("compiled, 4096", partial(measured, compiled, 4096)),
        *((f"kernels, {chunk}", partial(measured, kernels, chunk)) for chunk in (1024, 2048, 4096, 8192, 16384)),
        ("kernels, 4096, gradient returned", partial(measured, kernels, 4096, False)),
        ("kernels, 4096, frozen", partial(measured, kernels, 4096, False, True)),
        *_passes_alone(kernels),
    ]


def _passes_alone(kernels: Any) -> Variants:
    """Bytes per second of the two passes, for several shapes of their kernels."""
    from headrace.trainer import lm_head_kernels

    def measured(block: int, warps: int) -> str:
        logits, labels = random(4096, VOCABULARY), torch.zeros(4096, dtype=torch.int64, device=DEVICE)
        ones = torch.ones(4096, device=DEVICE)
        before = lm_head_kernels.BLOCK, lm_head_kernels.WARPS
        lm_head_kernels.BLOCK, lm_head_kernels.WARPS = block, warps
        try:
            score = milliseconds(lambda: kernels.score(logits, labels, ones))
            gradient = milliseconds(lambda: kernels.gradient(logits, labels, ones, -ones, ones, ones))
        finally:
            lm_head_kernels.BLOCK, lm_head_kernels.WARPS = before
        size = logits.nbytes / 1e9
        return f"{score:>8.2f} ms, {size / score:.2f} TB/s; gradient{gradient:>7.2f} ms, {2 * size / gradient:.2f} TB/s"

    return [
        (f"passes alone, block {block}, {warps} warps", partial(measured, block, warps))
        for block, warps in ((1024, 4), (2048, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16))
    ]


def attention() -> Variants:
    lengths = [len(sample) - 1 for sample in draw(CASES["mixed"], 0, 1)]

    def measured(lengths: list[int], kernel: Kernel, expanded: bool = False, batch: int = 1) -> str:
        rng = np.random.default_rng(0)
        row = make_row([rng.integers(0, 150_000, length) for length in lengths], DEVICE, kernel)
        places = row.token_ids.shape[1]
        q, k, v = (random(1, places, heads, 128).transpose(1, 2).requires_grad_() for heads in (16, 8, 8))
        direction = random(1, places, 16, 128)

        def forward() -> Tensor:
            keys, values = (s.repeat_interleave(2, 1) if expanded else s for s in (k, v))
            return packed_attention(torch.nn.Module(), q, keys, values, None, layout=row.layout)[0]

        first = milliseconds(forward)
        both = milliseconds(lambda: torch.autograd.grad(forward(), (q, k, v), direction))
        operations = 2 * 16 * 128 * sum(length**2 for length in lengths) / 1e9  # TFLOP, for milliseconds
        return (
            f"{first:>8.2f} ms, {operations / first:.0f} TFLOP/s; both{both:>7.2f} ms, "
            f"{3.5 * operations / both:.0f} TFLOP/s (backward 2.5 times forward)"
        )

    def dense(batch: int, length: int) -> str:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (random(batch, length, heads, 128).transpose(1, 2).requires_grad_() for heads in (16, 8, 8))
        direction = random(batch, 16, length, 128)

        def forward() -> Tensor:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        first = milliseconds(forward)
        both = milliseconds(lambda: torch.autograd.grad(forward(), (q, k, v), direction))
        operations = 2 * 16 * 128 * batch * length**2 / 1e9
        return f"{first:>8.2f} ms, {operations / first:.0f} TFLOP/s; both{both:>7.2f} ms, {3.5 * operations / both:.0f}"

    return [
        ("one of 16k: cudnn", partial(measured, [TOKENS], "cudnn")),
        ("one of 16k: flash", partial(measured, [TOKENS], "flash")),
        ("one of 64k: cudnn", partial(measured, [4 * TOKENS], "cudnn")),
        (f"{len(lengths)} mixed: flash", partial(measured, lengths, "flash")),
        (f"{len(lengths)} mixed: flash, heads expanded", partial(measured, lengths, "flash", True)),
        ("8 of 2k, padded: cudnn", partial(dense, 8, 2048)),
        ("16 of 1k, padded: cudnn", partial(dense, 16, 1024)),
        ("32 of 512, padded: cudnn", partial(dense, 32, 512)),
    ]


def products() -> Variants:
    def measured(*shapes: tuple[int, int, int]) -> str:
        """Of products [m, k] x [k, n], one after the other."""
        pairs = [(random(m, k), random(n, k)) for m, n, k in shapes]
        taken = milliseconds(lambda: [left @ right.t() for left, right in pairs])
        operations = sum(2 * m * n * k for m, n, k in shapes) / 1e9
        return f"{taken:>8.3f} ms, {operations / taken:.0f} TFLOP/s"

    def weight_gradient(n: int, k: int, dtype: torch.dtype) -> str:
        left, right = random(TOKENS, n), random(TOKENS, k)
        total = torch.zeros(n, k, device=DEVICE, dtype=dtype)
        taken = milliseconds(lambda: lm_head._add_product(total, left.t(), right))
        return f"{taken:>8.3f} ms, {2 * n * k * TOKENS / 1e9 / taken:.0f} TFLOP/s"

    t, h = TOKENS, HIDDEN
    return [
        ("q, k, v apart", partial(measured, (t, 2 * h, h), (t, h, h), (t, h, h))),
        ("q, k, v joined", partial(measured, (t, 4 * h, h))),
        ("gate, up apart", partial(measured, (t, 3 * h, h), (t, 3 * h, h))),
        ("gate, up joined", partial(measured, (t, 6 * h, h))),
        ("o", partial(measured, (t, h, 2 * h))),
        ("down", partial(measured, (t, h, 3 * h))),
        ("head, 4096 tokens", partial(measured, (4096, VOCABULARY, h))),
        ("largest: 16k x 8k x 8k", partial(measured, (t, 8192, 8192))),
        ("gradient of up, bfloat16", partial(weight_gradient, 3 * h, h, torch.bfloat16)),
        ("gradient of up, added to float32", partial(weight_gradient, 3 * h, h, torch.float32)),
        ("gradient of k, bfloat16", partial(weight_gradient, h, h, torch.bfloat16)),
        ("gradient of k, added to float32", partial(weight_gradient, h, h, torch.float32)),
        ("adapter's first: rank 16 of 2560", partial(measured, (t, 16, 2560))),
        ("adapter's second: 9728 of rank 16", partial(measured, (t, 9728, 16))),
    ]


def modes() -> Variants:
    """Whole steps of one 16k sequence."""
    from benchmarks.trainer.gpu import build, forget, our_step, timed

    def measured(case: Case, **settings: Any) -> str:
        forget()
        torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as directory:
            model = build(case, Path(directory), **settings)
            step = our_step(model, case)
            for seed in range(2):
                step(draw(case, 1000 + seed))
            samples = draw(case, 0)
            taken = statistics.median(timed(step, samples) for _ in range(3))
            peak = torch.cuda.max_memory_allocated() / GIB
        tokens = sum(len(sample) for sample in samples)
        return f"{tokens / taken:>8.0f} tokens/s, {peak:.1f} GiB, of which planned {model.plan.bytes / GIB:.1f}"

    one = CASES["one-16k"]
    return [
        *((f"recomputes {mode or 'nothing'}", partial(measured, one, activation_checkpointing=mode)) for mode in MODES),
        ("attention, logits not kept", partial(measured, one, activation_checkpointing="attention", memory=16 * GIB)),
        ("full, offload", partial(measured, one, activation_checkpointing="full", activation_offload=True)),
    ]


def narrow() -> Variants:
    """Forward and backward of one micro-batch, nothing recomputed."""
    from benchmarks.trainer.gpu import build, forget

    def measured(case: Case, dtype: torch.dtype) -> str:
        forget()
        torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as directory:
            model = build(case, Path(directory), activation_checkpointing=False)
        model.module.to(dtype)
        rng = np.random.default_rng(0)
        lengths = [len(sample) - 1 for sample in draw(case, 0, 1)]
        row = model.pack_row([rng.integers(0, 150_000, length) for length in lengths])
        places = torch.arange(sum(lengths), device=DEVICE)
        labels = torch.randint(0, VOCABULARY, (len(places),), device=DEVICE)
        ones = torch.ones(len(places), device=DEVICE)

        def both() -> None:
            model.score(row, places, labels, ones).logprobs.mean().backward()  # type: ignore[no-untyped-call]

        taken = milliseconds(both, 5)
        return f"{taken:>8.1f} ms, {torch.cuda.max_memory_allocated() / GIB:.1f} GiB"

    return [
        (f"{name}: {title}", partial(measured, CASES[name], dtype))
        for name in ("one-16k", "mixed")
        for title, dtype in (("float32 under autocast", torch.float32), ("bfloat16", torch.bfloat16))
    ]


VARIANTS: dict[str, Callable[[], Variants]] = {
    "head": head,
    "attention": attention,
    "products": products,
    "modes": modes,
    "narrow": narrow,
}
