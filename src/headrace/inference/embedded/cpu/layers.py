"""Fused decoder layers for CPUs: one kernel per step between matrix products, for tens of tokens at a time.

Norms, rotary embeddings with the KV cache's update, attention and activations are one kernel each. A layer is fused if
it has the usual submodules and its fused output equals its own on a short text; unless all layers of a model can be
fused, none is. Linear layers are called as modules, since adapters hook them.

Left out on purpose: types other than float32, which CPUs multiply fastest; attention of long chunks, which are matrix
products (see `kv_cache`).
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from headrace.inference.embedded.batch import make_batch
from headrace.inference.embedded.block_manager import blocks_for
from headrace.inference.embedded.cpu.kernels import NO_ROWS, AttentionShape, load_kernels, rows
from headrace.inference.embedded.kv_cache import KVCache, attend_in_group, paged_attention
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.scheduler import Chunk
from headrace.inference.schema import SamplingParams

PROBE_ATTENTION = "headrace_probe"
"""Name of the attention function that records its arguments."""
PROBE_TOKENS = 20
"""Length of the text that layers are compared on: more than a block."""
TOLERANCE = 1e-4
"""Largest difference to a layer's own output, relative to its largest number."""

ACTIVATION_INPUTS = torch.linspace(-8, 8, 65)
"""Inputs that activations are compared on."""
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
"""Names of the submodules of layers that can be fused; norms of heads may be missing."""


class AttentionArguments(NamedTuple):
    """A layer's arguments to attention besides queries, keys and values."""

    scaling: float
    window: int | None
    softcap: float | None


class FusedLayer:
    """The fused `forward` of a decoder layer; calls the layer's own outside of an engine."""

    def __init__(self, layer: Any, arguments: AttentionArguments) -> None:
        self.plain: Callable[..., Any] = layer.forward
        kernels = load_kernels()
        assert kernels is not None
        self._kernels = kernels
        self._attention, self._mlp = layer.self_attn, layer.mlp
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._arguments = arguments
        self._shape = _attention_shape(self._attention, arguments)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache: KVCache | None = kwargs.get("paged")
        if cache is None or cache.batch is None or cache.batch.single_tokens is None:
            return self.plain(hidden_states, *args, **kwargs)
        threads = torch.get_num_threads()
        normed = self._norm(hidden_states, None, 0, threads)
        attended = self._attention.o_proj(self._attend(normed, kwargs["position_embeddings"], cache, threads))
        normed = self._norm(hidden_states, attended, 1, threads)
        gate, up = self._mlp.gate_proj(normed), self._mlp.up_proj(normed)
        gated = torch.empty(gate.shape)
        self._kernels.gate_with_silu(rows(gate), rows(up), gated.data_ptr(), *gate.shape[1:], threads)
        added = self._mlp.down_proj(gated)
        self._kernels.add_and_norm(
            hidden_states.data_ptr(), rows(added), None, 0.0, None, *hidden_states.shape[1:], threads
        )
        return hidden_states

    def _norm(self, hidden: Tensor, added: Tensor | None, which: int, threads: int) -> Tensor:
        """Add `added` to the hidden states in place, and return their norm."""
        norm, normed = self._norms[which], torch.empty_like(hidden)
        added_rows = NO_ROWS if added is None else rows(added)
        self._kernels.add_and_norm(
            *(hidden.data_ptr(), added_rows, norm.weight.data_ptr(), norm.variance_epsilon, normed.data_ptr()),
            *(*hidden.shape[1:], threads),
        )
        return normed

    def _attend(self, normed: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache, threads: int) -> Tensor:
        """Store the keys and values of all tokens, and return their attention."""
        module, batch, shape = self._attention, cache.batch, self._shape
        assert batch is not None and batch.single_tokens is not None
        layer = cache.storage(module.layer_idx, shape.key_heads, shape.dim)
        query, key, value = module.q_proj(normed), module.k_proj(normed), module.v_proj(normed)
        cached = layer.keys.data_ptr(), layer.values.data_ptr()
        self._kernels.rotate_and_store(
            *(ctypes.byref(shape), rows(query), rows(key), rows(value), *(states.data_ptr() for states in angles)),
            *(batch.slots.data_ptr(), *cached, len(batch.slots), threads),
        )
        attended = torch.empty(1, len(batch.slots), shape.query_heads * shape.dim)
        singles = batch.single_tokens
        self._kernels.attend(
            *(ctypes.byref(shape), rows(query), *cached, singles.tables.data_ptr(), singles.tables.shape[1]),
            *(singles.owners.data_ptr(), batch.positions.data_ptr(), singles.longest, attended.data_ptr()),
            *(singles.count, threads),
        )
        if batch.groups:
            queries = query.view(len(batch.slots), -1, shape.dim)
            outputs = attended.view(queries.shape)
            scaling, window, _ = self._arguments
            for group in batch.groups:
                keys, values, mask = *layer.read(group), group.mask(window)
                outputs[group.begin : group.end] = attend_in_group(group, queries, keys, values, mask, scaling, None)
        return attended


def fuse_layers(model: Any) -> bool:
    """Fuse the decoder layers of a model, and return whether they are fused."""
    layers = [module for module in model.modules() if {name for name, _ in module.named_children()} == LAYER_PARTS]
    if layers and all(isinstance(layer.forward, FusedLayer) for layer in layers):
        return True
    config = model.config.get_text_config()
    if len(layers) != config.num_hidden_layers or not all(map(_is_supported, layers)) or load_kernels() is None:
        return False
    fused = _make_fused_layers(model, layers)
    if fused is None:
        return False
    for layer, forward in zip(layers, fused, strict=True):
        layer.forward = forward
    return True


@torch.inference_mode()
def _make_fused_layers(model: Any, layers: list[Any]) -> list[FusedLayer] | None:
    """Return fused forwards that compute the same as the layers' own on a short text; None if any differs."""
    arguments: dict[nn.Module, AttentionArguments] = {}
    fused: list[FusedLayer] = []

    def record(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        arguments[module] = AttentionArguments(scaling, kwargs.get("sliding_window"), kwargs.get("softcap"))
        return paged_attention(module, query, *args, **kwargs)

    def compare(layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Any) -> None:
        own = arguments.get(layer.self_attn)
        if own is not None and _has_supported_shapes(layer, own, kwargs) and isinstance(output, Tensor):
            candidate = FusedLayer(layer, own)
            ours = candidate(args[0].clone(), **{**kwargs, "paged": second})
            if (ours - output).abs().max() <= TOLERANCE * output.abs().max():
                fused.append(candidate)

    positions = torch.arange(PROBE_TOKENS)
    tokens = positions % model.get_input_embeddings().num_embeddings
    first, second = (_cache_for(tokens.tolist(), len(layers), single_tokens=each) for each in (False, True))
    before = model.config._attn_implementation
    AttentionInterface.register(PROBE_ATTENTION, record)
    model.set_attn_implementation(PROBE_ATTENTION)
    hooks = [layer.register_forward_hook(compare, with_kwargs=True) for layer in layers]
    try:
        inputs = {"input_ids": tokens[None], "position_ids": positions[None], "logits_to_keep": 1}
        model(**inputs, past_key_values=first, use_cache=True, paged=first)
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)
    return fused if len(fused) == len(layers) else None


def _cache_for(tokens: list[int], layers: int, *, single_tokens: bool) -> KVCache:
    """Return a cache prepared for a forward of these tokens."""
    request = Request(
        tokens, SamplingParams(), max_new_tokens=1, eos_token_ids=(), shared_random=random.Random(0), cache_salt=None
    )
    request.blocks = [*range(1, 1 + blocks_for(len(tokens)))]
    cache = KVCache(layers, 1 + len(request.blocks))
    chunks = [Chunk(request, 0, len(tokens))]
    cache.prepare(make_batch(chunks, torch.device("cpu"), torch.float32, single_tokens=single_tokens))
    return cache


def _has_supported_shapes(layer: Any, arguments: AttentionArguments, kwargs: dict[str, Any]) -> bool:
    """Return whether the kernels would stay within the bounds of a layer's tensors."""
    attention, mlp = layer.self_attn, layer.mlp
    dim = attention.head_dim
    queries, keys = attention.q_proj.out_features, attention.k_proj.out_features
    angles = kwargs.get("position_embeddings")
    return (
        arguments.softcap is None
        and dim % 2 == 0
        and keys % dim == 0
        and queries % keys == 0
        and attention.v_proj.out_features == keys
        and attention.o_proj.in_features == queries
        and mlp.gate_proj.out_features == mlp.up_proj.out_features
        and isinstance(angles, tuple)
        and all(states.shape == (1, PROBE_TOKENS, dim) and states.is_contiguous() for states in angles)
        and all(states.dtype == torch.float32 for states in angles)
    )


def _is_supported(layer: Any) -> bool:
    """Return whether a layer has the usual submodules, unchanged and in float32."""
    attention, mlp = (dict(module.named_children()) for module in (layer.self_attn, layer.mlp))
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attention[name] for name in HEAD_NORMS if name in attention]
    modules = (layer, layer.self_attn, layer.mlp, mlp.get("act_fn"), *norms)
    return (
        attention.keys() in (ATTENTION_PARTS, ATTENTION_PARTS | HEAD_NORMS)
        and mlp.keys() == MLP_PARTS
        and torch.equal(mlp["act_fn"](ACTIVATION_INPUTS), F.silu(ACTIVATION_INPUTS))
        and all(hasattr(norm, "weight") and hasattr(norm, "variance_epsilon") for norm in norms)
        and all(parameter.dtype == torch.float32 for parameter in layer.parameters())
        and not any("forward" in vars(module) for module in modules)
        and not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
    )


def _attention_shape(attention: Any, arguments: AttentionArguments) -> AttentionShape:
    """Return the sizes and settings of an attention module for the kernels."""
    dim = attention.head_dim
    norms = [getattr(attention, name, None) for name in sorted(HEAD_NORMS, reverse=True)]
    weights = [None if norm is None else norm.weight.data_ptr() for norm in norms]
    eps = 0.0 if norms[0] is None else norms[0].variance_epsilon
    heads = (projection.out_features // dim for projection in (attention.q_proj, attention.k_proj))
    return AttentionShape(*heads, dim, arguments.window or 0, arguments.scaling, eps, *weights)
