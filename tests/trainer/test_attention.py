"""Every kernel gives each token exactly its own past, and what cannot be computed is refused with a reason."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.trainer import attention
from headrace.trainer.attention import (
    KernelSetting,
    UnavailableAttention,
    UnsupportedModel,
    _Arguments,
    available_kernel,
    packed_attention,
)
from headrace.trainer.packed_row import Kernel, PackedRow, make_row
from tests.refusals import refused
from tests.trainer.packed_modules import assert_similar, on_gpu, sequences_that_share
from tests.trainer.plain_kernels import cudnn_forward, use_plain_kernels

CPU = torch.device("cpu")
KERNELS: tuple[Kernel, ...] = ("sdpa", "cudnn", "flash")


def rows(device: str, kernel: Kernel) -> dict[str, PackedRow]:
    rng = np.random.default_rng(0)
    sequences = {
        "one": [rng.integers(0, 96, 700)],
        "several": [rng.integers(0, 96, n) for n in (1, 130, 64, 500, 3)],
        "shared": sequences_that_share(),
    }
    return {name: make_row(each, torch.device(device), kernel) for name, each in sequences.items()}


def attend(row: PackedRow, dtype: torch.dtype, window: int | None = None) -> dict[str, Tensor]:
    """Output and gradients for the same random numbers, of 4 heads that ask and 2 that answer."""
    device, places = row.token_ids.device, 1 + max(int(each.max()) for each in row.places)
    padding = row.token_ids.shape[1] - places
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (1, 4, places, 16), "key": (1, 2, places, 16), "value": (1, 2, places, 16)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    states = {name: t.bfloat16().to(device, dtype).requires_grad_() for name, t in made.items()}
    output, _ = packed_attention(
        torch.nn.Module(),
        **{name: F.pad(t, (0, 0, 0, padding), value=0.5) for name, t in states.items()},
        attention_mask=None,
        sliding_window=window,
        layout=row.layout,
    )
    output = output[:, :places]
    direction = torch.randn(output.shape, generator=generator).to(output)
    grads = torch.autograd.grad((output * direction).sum(), list(states.values()))
    return {"output": output.detach(), **dict(zip(states, grads, strict=True))}


@on_gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("name", ["one", "several", "shared"])
def test_kernels_of_a_gpu_agree_with_float32(kernel: Kernel, window: int | None, name: str):
    given = attend(rows("cuda", kernel)[name], torch.bfloat16, window)
    assert_similar(given, attend(rows("cuda", "sdpa")[name], torch.float32, window), 0.01)


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
@pytest.mark.parametrize("window", [None, 7, 1000])
@pytest.mark.parametrize("name", ["one", "several", "shared"])
def test_sequences_back_to_back_are_computed_as_in_blocks(
    kernel: Kernel, window: int | None, name: str, monkeypatch: pytest.MonkeyPatch
):
    """What is gathered for the kernels, and what becomes of their gradients."""
    use_plain_kernels(monkeypatch)
    given, expected = (attend(rows("cpu", each)[name], torch.float32, window) for each in (kernel, "sdpa"))
    for name, tensor in expected.items():
        torch.testing.assert_close(given[name], tensor, atol=1e-5, rtol=1e-5)


def test_cudnn_reads_rows_of_one_sequence_alone(monkeypatch: pytest.MonkeyPatch):
    use_plain_kernels(monkeypatch)
    asked = []
    monkeypatch.setattr(attention, "_cudnn_forward", lambda *a: asked.append(len(a[0])) or cudnn_forward(*a))
    for name in ("several", "shared", "one"):
        attend(rows("cpu", "cudnn")[name], torch.float32)
    attend(rows("cpu", "cudnn")["one"], torch.float32, window=7)
    attend(rows("cpu", "flash")["one"], torch.float32)
    assert asked == [1024]


@pytest.mark.parametrize("window", [None, 7])
def test_kernels_of_a_gpu_take_what_they_are_given(window: int | None):
    """By what this torch says of their shapes, without a GPU."""
    query, key = (torch.empty(size, 2, 64, dtype=torch.bfloat16, device="meta") for size in (100, 160))
    starts = torch.empty(6, dtype=torch.int32, device="meta")
    row = _Arguments(starts, starts, starts, 30, 50, False, 0.125, window)
    output, logsumexp = attention._flash_forward(query, key, key, row)
    gradients = attention._flash_backward(output, query, key, key, output, logsumexp, row)
    assert [output.shape, logsumexp.shape] == [query.shape, (2, 100)]
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, key.shape]
    output, logsumexp = attention._cudnn_forward(query, query, query, 0.125)
    gradients = attention._cudnn_backward(output, query, query, query, output, logsumexp, 0.125)
    assert [output.shape, logsumexp.shape] == [query.shape, (2, 100)]
    assert {gradient.shape for gradient in gradients} == {query.shape}


def test_attention_is_computed_in_the_type_of_the_values():
    row = rows("cpu", "sdpa")["several"]
    states = torch.randn(1, 2, row.token_ids.shape[1], 16)
    output, _ = packed_attention(
        torch.nn.Module(), states, states, states.bfloat16(), attention_mask=None, layout=row.layout
    )
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("choice", ["auto", "sdpa"])
def test_a_cpu_computes_in_blocks(choice: KernelSetting):
    assert available_kernel(choice, CPU, torch.float32, head_dim=64) == "sdpa"


@pytest.mark.parametrize("choice", ["cudnn", "flash"])
def test_kernels_of_a_gpu_are_refused_on_a_cpu(choice: Kernel):
    with refused(UnavailableAttention, key="trainer.attention", value=choice):
        available_kernel(choice, CPU, torch.bfloat16, head_dim=64)


@on_gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [(torch.float32, 64, "float32"), (torch.bfloat16, 12, "12"), (torch.bfloat16, 264, "264")],
)
def test_what_a_gpu_cannot_compute_with_its_kernels_is_computed_in_blocks(
    dtype: torch.dtype, head_dim: int, reason: str
):
    device = torch.device("cuda")
    assert [available_kernel(kernel, device, torch.bfloat16, head_dim=128) for kernel in KERNELS] == list(KERNELS)
    assert available_kernel("auto", device, torch.bfloat16, head_dim=128) == "cudnn"
    assert available_kernel("auto", device, dtype, head_dim) == "sdpa"
    with pytest.raises(UnavailableAttention, match=reason):
        available_kernel("cudnn", device, dtype, head_dim)


def test_other_kinds_of_attention_are_refused():
    row = rows("cpu", "sdpa")["one"]
    states = torch.zeros(1, 2, 700, 16)
    module = torch.nn.Module()
    with pytest.raises(UnsupportedModel, match="'position_bias'"):
        packed_attention(module, states, states, states, None, layout=row.layout, position_bias=states)
    with pytest.raises(UnsupportedModel, match="`layout`"):
        packed_attention(module, states, states, states, None)
    module.is_causal = False
    with pytest.raises(UnsupportedModel, match="causal"):
        packed_attention(module, states, states, states, None, layout=row.layout)
