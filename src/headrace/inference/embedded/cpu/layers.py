"""Decoder layers with few operations between their matrix products, for tens of tokens at a time.

What most models compute there one operation after the other (norms, rotation, storing keys, attention, activations) is
here one kernel each. Layers are known by what they consist of, and by trying: whoever computes anything else keeps its
own `forward`, and so does a model on the whole. Linear layers are called as modules: adapters hook them.

Left out on purpose: other types than float32, which CPUs multiply fastest; attention of long chunks, which are matrix
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
from headrace.inference.embedded.blocks import blocks_for
from headrace.inference.embedded.cpu.compiling import NOTHING, Shape, kernels, rows
from headrace.inference.embedded.kv_cache import KVCache, attend_in_group, paged_attention
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.scheduler import Chunk
from headrace.inference.schema import SamplingParams

PROBING = "headrace_probing"
"""The name of the attention function that notes what it is asked for."""
PROBED = 20
"""Tokens of the text that layers are compared on: more than a block."""
TOLERANCE = 1e-4
"""Largest difference to a layer's own output, beside its largest number."""

NUMBERS = torch.linspace(-8, 8, 65)
"""What activations are compared on."""
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class Asked(NamedTuple):
    """What a layer asks of attention beside queries, keys and values."""

    scaling: float
    window: int | None
    softcap: float | None


class FusedLayer:
    """The `forward` of a decoder layer: its own one outside of an engine."""

    def __init__(self, layer: Any, asked: Asked) -> None:
        self.plain: Callable[..., Any] = layer.forward
        functions = kernels()
        assert functions is not None
        self._kernels = functions
        self._attention, self._mlp = layer.self_attn, layer.mlp
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._asked = asked
        self._shape = _shape(self._attention, asked)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache: KVCache | None = kwargs.get("paged")
        if cache is None or cache.batch is None or cache.batch.one_by_one is None:
            return self.plain(hidden_states, *args, **kwargs)
        threads = torch.get_num_threads()
        normed = self._norm(hidden_states, None, 0, threads)
        attended = self._attention.o_proj(self._attend(normed, kwargs["position_embeddings"], cache, threads))
        normed = self._norm(hidden_states, attended, 1, threads)
        gate, up = self._mlp.gate_proj(normed), self._mlp.up_proj(normed)
        gated = torch.empty(gate.shape)
        self._kernels.gate_with_silu(rows(gate), rows(up), gated.data_ptr(), *gate.shape[1:], threads)
        return hidden_states.add_(self._mlp.down_proj(gated))

    def _norm(self, hidden: Tensor, added: Tensor | None, which: int, threads: int) -> Tensor:
        """The norm of what is added to the hidden states first."""
        norm, normed = self._norms[which], torch.empty_like(hidden)
        self._kernels.add_and_norm(
            hidden.data_ptr(),
            NOTHING if added is None else rows(added),
            norm.weight.data_ptr(),
            norm.variance_epsilon,
            normed.data_ptr(),
            *hidden.shape[1:],
            threads,
        )
        return normed

    def _attend(self, normed: Tensor, angles: tuple[Tensor, Tensor], cache: KVCache, threads: int) -> Tensor:
        """What all tokens attend to, once their keys and values are stored."""
        module, batch, shape = self._attention, cache.batch, self._shape
        assert batch is not None and batch.one_by_one is not None
        layer = cache.storage(module.layer_idx, shape.key_heads, shape.dim)
        query, key, value = module.q_proj(normed), module.k_proj(normed), module.v_proj(normed)
        places = layer.keys.data_ptr(), layer.values.data_ptr()
        self._kernels.rotate_and_store(
            ctypes.byref(shape),
            *(rows(query), rows(key), rows(value)),
            *(states.data_ptr() for states in angles),
            batch.slots.data_ptr(),
            *places,
            len(batch.slots),
            threads,
        )
        attended = torch.empty(1, len(batch.slots), shape.query_heads * shape.dim)
        few = batch.one_by_one
        self._kernels.attend(
            ctypes.byref(shape),
            rows(query),
            *places,
            few.tables.data_ptr(),
            few.tables.shape[1],
            few.owners.data_ptr(),
            batch.positions.data_ptr(),
            few.longest,
            attended.data_ptr(),
            few.count,
            threads,
        )
        if batch.groups:
            queries = query.view(len(batch.slots), -1, shape.dim)
            outputs = attended.view(queries.shape)
            for group in batch.groups:
                outputs[group.begin : group.end] = attend_in_group(
                    group, queries, *layer.read(group), group.mask(self._asked.window), self._asked.scaling, None
                )
        return attended


def fuse_layers(model: Any) -> bool:
    """Give the decoder layers of a model fused forwards; whether that could be, or had been, done."""
    layers = [module for module in model.modules() if {name for name, _ in module.named_children()} == LAYER]
    if layers and all(isinstance(layer.forward, FusedLayer) for layer in layers):
        return True
    config = model.config.get_text_config()
    if len(layers) != config.num_hidden_layers or not all(map(_is_usual, layers)) or kernels() is None:
        return False
    fused = _probe(model, layers)
    if fused is None:
        return False
    for layer, forward in zip(layers, fused, strict=True):
        layer.forward = forward
    return True


@torch.inference_mode()
def _probe(model: Any, layers: list[Any]) -> list[FusedLayer] | None:
    """Fused forwards that compute what the layers' own do, on a short text; None if any does not."""
    asked: dict[nn.Module, Asked] = {}
    fused: list[FusedLayer] = []

    def note(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        asked[module] = Asked(scaling, kwargs.get("sliding_window"), kwargs.get("softcap"))
        return paged_attention(module, query, *args, **kwargs)

    def compare(layer: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Any) -> None:
        settings = asked.get(layer.self_attn)
        if settings is not None and _has_usual_shapes(layer, settings, kwargs) and isinstance(output, Tensor):
            candidate = FusedLayer(layer, settings)
            ours = candidate(args[0].clone(), **{**kwargs, "paged": second})
            if (ours - output).abs().max() <= TOLERANCE * output.abs().max():
                fused.append(candidate)

    tokens = torch.arange(PROBED) % model.get_input_embeddings().num_embeddings
    first, second = (_cache_for(tokens.tolist(), len(layers), one_by_one=each) for each in (False, True))
    before = model.config._attn_implementation
    AttentionInterface.register(PROBING, note)
    model.set_attn_implementation(PROBING)
    hooks = [layer.register_forward_hook(compare, with_kwargs=True) for layer in layers]
    try:
        model(
            input_ids=tokens[None],
            position_ids=torch.arange(PROBED)[None],
            past_key_values=first,
            use_cache=True,
            logits_to_keep=1,
            paged=first,
        )
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)
    return fused if len(fused) == len(layers) else None


def _cache_for(tokens: list[int], layers: int, *, one_by_one: bool) -> KVCache:
    """A cache whose next forward is of these tokens."""
    request = Request(
        tokens, SamplingParams(), max_new=1, eos_token_ids=(), shared_random=random.Random(0), cache_salt=None
    )
    request.blocks = [*range(1, 1 + blocks_for(len(tokens)))]
    cache = KVCache(layers, 1 + len(request.blocks))
    chunks = [Chunk(request, 0, len(tokens))]
    cache.prepare(make_batch(chunks, torch.device("cpu"), torch.float32, one_by_one=one_by_one))
    return cache


def _has_usual_shapes(layer: Any, asked: Asked, kwargs: dict[str, Any]) -> bool:
    """Whether kernels would read and write where they may."""
    attention, mlp = layer.self_attn, layer.mlp
    dim = attention.head_dim
    queries, keys = attention.q_proj.out_features, attention.k_proj.out_features
    angles = kwargs.get("position_embeddings")
    return (
        asked.softcap is None
        and dim % 2 == 0
        and keys % dim == 0
        and queries % keys == 0
        and attention.v_proj.out_features == keys
        and attention.o_proj.in_features == queries
        and mlp.gate_proj.out_features == mlp.up_proj.out_features
        and isinstance(angles, tuple)
        and all(states.shape == (1, PROBED, dim) and states.is_contiguous() for states in angles)
        and all(states.dtype == torch.float32 for states in angles)
    )


def _is_usual(layer: Any) -> bool:
    """Whether a layer has the parts that most have."""
    attention, mlp = (dict(module.named_children()) for module in (layer.self_attn, layer.mlp))
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [attention[name] for name in HEAD_NORMS if name in attention]
    return (
        attention.keys() in (ATTENTION, ATTENTION | HEAD_NORMS)
        and mlp.keys() == MLP
        and torch.equal(mlp["act_fn"](NUMBERS), F.silu(NUMBERS))
        and all(hasattr(norm, "weight") and hasattr(norm, "variance_epsilon") for norm in norms)
        and all(parameter.dtype == torch.float32 for parameter in layer.parameters())
        and not any(map(_is_changed, (layer, layer.self_attn, layer.mlp, mlp["act_fn"], *norms)))
    )


def _is_changed(module: nn.Module) -> bool:
    """Whether somebody wants to have a say in what a module computes."""
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def _shape(attention: Any, asked: Asked) -> Shape:
    dim = attention.head_dim
    norms = [getattr(attention, name, None) for name in sorted(HEAD_NORMS, reverse=True)]
    weights = [None if norm is None else norm.weight.data_ptr() for norm in norms]
    eps = 0.0 if norms[0] is None else norms[0].variance_epsilon
    heads = (projection.out_features // dim for projection in (attention.q_proj, attention.k_proj))
    return Shape(*heads, dim, asked.window or 0, asked.scaling, eps, *weights)
