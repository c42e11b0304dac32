"""Checkpointing, compiling, offload and sharding of a model's decoder layers, applied from outside.

Checkpointing recomputes activations in the backward pass; offload keeps them in CPU memory until then. Both wrap a
layer's `forward`, inside of its hooks, so that a layer that is sharded afterwards gathers its parameters as usual. The
order is checkpoint, compile, offload, shard: the compiler must see checkpointing, and must not see offload's streams.

Layers are compiled one by one: they are the same program, so the compiler runs once for all of them. Lengths are
symbolic, and only attention's operator depends on the rest of a row's layout. Left out on purpose: compiling the whole
model, which takes minutes and gains little; attention in padded blocks, which breaks the graph, so that a checkpointed
layer runs uncompiled; and offload of what selective checkpointing keeps, unless the layer is compiled: without a
compiler it does not pass through autograd.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from headrace.trainer import attention  # noqa: F401 (registers an operator)
from headrace.trainer.memory_plan import Checkpointing

_aten = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.headrace.attend.default,
}
_MATRIX_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten._grouped_mm.default}

MIN_OFFLOADED_BYTES = 1 << 20
"""Smaller tensors stay on the GPU: the copy would cost more than it saves."""


def checkpoint_layers(layers: Iterable[torch.nn.Module], mode: Checkpointing) -> None:
    """Make layers recompute their activations in the backward pass, except for those that the mode keeps."""
    policies = {"attention": _save_attention, "selective": _save_attention_and_products}
    options: dict[str, Any] = {}
    if mode != "full":
        options["context_fn"] = context = partial(create_selective_checkpoint_contexts, policies[mode])
        # The key of the policies' code, without which the compiler would not use its caches of earlier runs.
        vars(context)["cache_hash"] = f"{mode} {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"
    for layer in layers:
        layer.forward = _with_checkpointing(layer.forward, options)


def _with_checkpointing(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # There is no dropout, so no RNG state to preserve.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

    return wrapped


def _save_attention(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _save_attention_and_products(_: Any, operator: Any, *args: Any, **__: Any) -> CheckpointPolicy:
    keep = operator in _ATTENTION
    if operator in _MATRIX_PRODUCTS:
        left, right = args[1:3] if operator is _aten.addmm.default else args[:2]
        keep = 16 * left.shape[-1] > right.shape[-1]  # a short inner dimension, as of an adapter, is cheap to recompute
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def offload_activations(layers: Iterable[torch.nn.Module], min_bytes: int = MIN_OFFLOADED_BYTES) -> None:
    """Make layers keep the tensors of the backward pass in CPU memory; parameters stay on the GPU.

    Copies overlap with the following layers, and in the backward pass with the preceding ones. No effect on a CPU.
    """
    newest: list[Callable[[], _Stage | None]] = [lambda: None]
    for number, layer in enumerate(layers):
        layer.forward = _with_offload(layer, newest, number == 0, min_bytes)


def _with_offload(
    layer: torch.nn.Module, newest: list[Callable[[], _Stage | None]], first: bool, min_bytes: int
) -> Callable[..., Any]:
    """Return the layer's `forward` with offload. `newest` has the newest stage of a pass over the layers.

    Only autograd's saved tensors keep stages alive.
    """
    forward = layer.forward

    @wraps(forward)
    def wrapped(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        stage = _Stage(hidden.device, None if first else newest[0]())
        newest[0] = weakref.ref(stage)
        shared = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        pack = _PackHook(stage, list(layer.parameters()), shared, min_bytes)
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            output = forward(hidden, *args, **kwargs)
        stage.close()
        return output

    return wrapped


class _PackHook:
    """Moves tensors that a layer saves to a stage, except for parameters and inputs that all layers share."""

    def __init__(self, stage: _Stage, parameters: list[Tensor], shared: list[Tensor], min_bytes: int) -> None:
        self._stage = stage
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in (*parameters, *shared)}
        # Autocast saves narrower copies of parameters, which it keeps alive anyway.
        self._shapes = {shape for parameter in parameters for shape in (parameter.shape, parameter.shape[::-1])}
        self._min_bytes = min_bytes

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, tensor: Tensor) -> Tensor | _SavedTensor:
        small = tensor.nbytes < self._min_bytes or not tensor.is_floating_point()
        shared = tensor.shape in self._shapes or tensor.untyped_storage().data_ptr() in self._storages
        return tensor if small or shared else self._stage.put(tensor)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _unpack(saved: Tensor | _SavedTensor) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.stage.take(saved.number)


class _Stage:
    """The saved tensors of one layer. They are freed on the GPU when the second layer after it starts.

    So the last two layers keep theirs, which the backward pass needs first.
    """

    def __init__(self, device: torch.device, before: _Stage | None) -> None:
        self._device = device
        self._moves = device.type == "cuda"
        self._before = before
        self._numbers: dict[Any, int] = {}
        self._tensors: list[Tensor] | None = []
        self._copies: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None
        self._loaded: torch.cuda.Event | None = None
        old = None if before is None else before._before
        if old is not None and old._copied is not None:
            torch.cuda.current_stream(device).wait_event(old._copied)
            old._tensors = None

    def put(self, tensor: Tensor) -> _SavedTensor:
        """Start to copy a tensor to the host; a tensor that several operators save is copied once."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            assert self._tensors is not None
            self._tensors.append(tensor.detach())
            if self._moves:
                stream = _copy_stream(self._device, "host")
                stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(stream):
                    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
                    self._copies.append(copy.copy_(tensor.detach(), non_blocking=True))
        return _SavedTensor(self, self._numbers[key])

    def close(self) -> None:
        """End the layer's forward pass."""
        self._numbers.clear()
        if self._moves:
            self._copied = _copy_stream(self._device, "host").record_event()

    def take(self, number: int) -> Tensor:
        """Return the tensor on the GPU, and start to load those of the layer before."""
        self._load()
        if self._before is not None:
            self._before._load()
        if self._loaded is not None:
            torch.cuda.current_stream(self._device).wait_event(self._loaded)
        assert self._tensors is not None
        return self._tensors[number]

    def _load(self) -> None:
        if self._tensors is not None:
            return
        stream = _copy_stream(self._device, "device")
        self._tensors = [torch.empty_like(copy, device=self._device) for copy in self._copies]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                tensor.copy_(copy, non_blocking=True).record_stream(stream)
        self._loaded = stream.record_event()


class _SavedTensor(NamedTuple):
    """A reference to a tensor of a stage."""

    stage: _Stage
    number: int


@cache
def _copy_stream(device: torch.device, to: str) -> torch.cuda.Stream:
    """Return the stream of copies to the `host` or to the `device`."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


MAX_PROGRAMS = 64
"""Compiled programs of all layers: some for each kind of attention and recompute mode, with and without gradients."""


def compile_layers(layers: Iterable[torch.nn.Module], backend: str = "inductor", *, sharded: bool = False) -> None:
    """Compile each layer at its first call.

    With `sharded` parameters lengths are not symbolic from the start, since the sizes of parameters would be, too: a
    second row of another length then compiles a program with symbolic lengths.
    """
    from torch._inductor import config  # takes a second to import

    # Beyond its own limit (8 for all layers) the compiler runs new programs uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_PROGRAMS)
    # A symbolic float becomes a constant in the end, but only after the layer has been traced twice.
    torch._dynamo.config.specialize_float = True
    # A router replaces functions of torch while it runs, which counts as a side effect; without it, checkpointed layers
    # with experts would run uncompiled.
    if hasattr(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint"):
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # Fuse the gradients of norms for all lengths: otherwise short and long rows are two programs.
    if hasattr(config.triton, "mix_order_reduction_non_strict_mode"):  # not in every version of torch
        config.triton.mix_order_reduction_non_strict_mode = True
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=None if sharded else True)


def fsdp_shard(layers: Iterable[torch.nn.Module], root: torch.nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard parameters, gradients and optimizer state over a mesh, layer by layer (FSDP2); compute in `dtype`.

    Parameters outside of layers, such as embeddings, are in the root's group. Gradients are summed in float32, not
    averaged: the loss is already divided by counts over all ranks.
    """
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for part in (*layers, root):
        sharded = fully_shard(part, mesh=mesh, mp_policy=precision)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo and some NCCL reductions cannot scale
