"""Checkpointing and offload change what is kept for the backward pass, and nothing else."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.trainer import layers
from headrace.trainer.layers import checkpoint_layers, compile_layers, offload_activations
from headrace.trainer.lora import add_lora
from headrace.trainer.packed_row import make_row
from headrace.trainer.ranks import Ranks
from tests.trainer.packed_modules import (
    assert_similar,
    backward_through,
    hidden_states,
    on_gpu,
    packed_module,
    row_that_shares,
    sequences_that_share,
)

MODES = ("none", "full", "attention", "selective")


def module_with(checkpointing: str = "none", offload: bool = False) -> Any:
    module = packed_module("qwen3", layers=4)
    if checkpointing != "none":
        checkpoint_layers(module.model.layers, checkpointing)
    if offload:
        offload_activations(module.model.layers, min_bytes=1)
    return module


@pytest.mark.parametrize("checkpointing", MODES)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_hidden_states_and_gradients_are_exactly_those_of_the_plain_model(
    checkpointing: str, offload: bool, sharded: bool
):
    if sharded and torch.cuda.is_available():
        pytest.skip("shards would be on the GPU, whose sums are not exact")
    module, row = module_with(checkpointing, offload), row_that_shares()
    if sharded:
        for part in (*module.model.layers, module.model):
            fully_shard(part, mesh=Ranks().mesh())
    hidden, grads = backward_through(module, row)
    expected, expected_grads = backward_through(packed_module("qwen3", layers=4), row)
    assert torch.equal(hidden, expected)
    for name, grad in expected_grads.items():
        assert torch.equal(grads[name].full_tensor() if sharded else grads[name], grad), name


@on_gpu
@pytest.mark.parametrize("checkpointing", MODES)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("autocast", "compiled"), [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.full)]
)
def test_gradients_on_a_gpu_are_those_of_the_plain_model(
    checkpointing: str, offload: bool, autocast: bool, compiled: bool
):
    """With tensors so large that copies are still under way when the next layer starts."""
    torch._dynamo.reset()
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "head_dim": 64}
    module, plain = (packed_module("llama", layers=6, **sizes).to("cuda") for _ in range(2))
    if checkpointing != "none":
        checkpoint_layers(module.model.layers, checkpointing)
    if compiled:
        compile_layers(module.model.layers)
    if offload:
        offload_activations(module.model.layers, min_bytes=1)
    row = make_row(sequences_that_share(scale=80), torch.device("cuda"), "auto")
    for _ in range(2):  # the second pass finds the first one's buffers
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            hidden, grads = backward_through(module if autocast else module.bfloat16(), row)
            expected, expected_grads = backward_through(plain if autocast else plain.bfloat16(), row)
        assert_similar({"hidden": hidden, **grads}, {"hidden": expected, **expected_grads}, 0.05 if compiled else 0.02)


class LiveStorages(TorchDispatchMode):
    """Every storage that an operator has made, for as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Callable[[], Any]] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        return outputs

    def count_bytes(self) -> int:
        gc.collect()
        alive = [reference() for reference in self._storages.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def kept_bytes(checkpointing: str) -> int:
    """Between the forward and the backward pass."""
    module, row = module_with(checkpointing), row_that_shares()
    with LiveStorages() as live:
        hidden = hidden_states(module, row)
        return live.count_bytes() - hidden.nbytes


def test_each_mode_of_checkpointing_keeps_more_than_the_one_before():
    kept = {mode: kept_bytes(mode) for mode in MODES}
    assert kept["full"] < kept["attention"] < 0.6 * kept["selective"]
    assert kept["selective"] < 0.75 * kept["none"]


def test_an_adapters_second_product_is_computed_again_and_its_first_is_kept():
    row = row_that_shares()
    kept = {}
    for adapts in (False, True):
        module = module_with()
        if adapts:
            add_lora(module, r=1, alpha=1)
        else:
            module.requires_grad_(False)
            module.model.embed_tokens.requires_grad_(True)
        checkpoint_layers(module.model.layers, "selective")
        with LiveStorages() as live:
            hidden = hidden_states(module, row)
            kept[adapts] = live.count_bytes() - hidden.nbytes
    # One number for each token is a first product; a second is 24 to 48 for each of a layer's seven.
    second = 4 * row.token_ids.shape[1] * 4 * (2 * 48 + 2 * 24 + 2 * 32 + 48)
    assert 0 < kept[True] - kept[False] < second / 10


def test_parameters_and_what_all_layers_share_are_never_offloaded(monkeypatch: pytest.MonkeyPatch):
    put: list[Tensor] = []
    original = layers._Stage.put
    monkeypatch.setattr(layers._Stage, "put", lambda stage, tensor: put.append(tensor) or original(stage, tensor))
    module, row = module_with(offload=True), row_that_shares()
    backward_through(module, row)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert put
    assert not parameters & {tensor.untyped_storage().data_ptr() for tensor in put}
    places, head_dim = row.token_ids.shape[1], module.config.head_dim
    assert (1, places, head_dim) not in {tuple(tensor.shape) for tensor in put}  # cosines and sines of positions


def test_offload_lets_go_of_everything_after_the_backward_pass():
    backward_through(module_with(offload=True), row_that_shares())
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is layers._Stage]


def test_forward_without_gradients_is_not_recorded():
    module = module_with("selective", offload=True)
    row = make_row([np.arange(10)], torch.device("cpu"))
    with torch.no_grad():
        assert not hidden_states(module, row).requires_grad
