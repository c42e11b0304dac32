"""Joined linear layers compute what they computed apart, with new weights and adapters as well."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.inference.self_check import FAMILIES, make_sharp_model
from torch import nn

from headrace.inference.embedded.projections import JoinedLinear, group_by_input, join_projections, separate_projections

ATTENTION, GATED = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}


def make_models(family: str) -> tuple[Any, Any]:
    """A model, and the same with joined layers."""
    plain = make_sharp_model(family, 0, torch.float32)
    joined = copy.deepcopy(plain)
    join_projections(joined)
    return plain, joined


@torch.inference_mode()
def logits(model: Any, tokens: int = 30) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=torch.arange(tokens)[None] % 90, use_cache=False).logits
    return result


def assert_same(plain: Any, joined: Any) -> None:
    """To the rounding of float32: products of other sizes are summed in another order."""
    expected = logits(plain)
    assert (logits(joined) - expected).abs().max() <= 1e-5 * expected.abs().max()


def joined_names(model: Any) -> set[str]:
    return {name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is JoinedLinear}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_every_family_computes_the_same_before_and_after_new_weights(family: str) -> None:
    plain, joined = make_models(family)
    assert [(name, p.shape) for name, p in joined.named_parameters()] == [
        (name, p.shape) for name, p in plain.named_parameters()
    ]
    assert joined.state_dict().keys() == plain.state_dict().keys()
    for change in (0.0, 0.05):
        with torch.no_grad():
            for one, other in zip(plain.parameters(), joined.parameters(), strict=True):
                one.add_(change * torch.randn(one.shape, generator=torch.Generator().manual_seed(0)))
                other.copy_(one)
        assert_same(plain, joined)


@pytest.mark.parametrize(
    ("family", "names"),
    [("qwen2", ATTENTION | GATED), ("gemma 2", ATTENTION | GATED), ("qwen3, experts", ATTENTION), ("phi 3", set())],
)
def test_layers_with_one_input_are_joined_and_no_others(family: str, names: set[str]) -> None:
    _, model = make_models(family)
    assert joined_names(model) == names
    for module in model.modules():
        if type(module) is JoinedLinear and module.joined is not None:
            assert module.weight.untyped_storage().data_ptr() == module.joined[0].untyped_storage().data_ptr()
    again = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    join_projections(model)
    assert again == {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}


def test_tied_layers_stay_apart() -> None:
    model = make_sharp_model("llama", 0, torch.float32)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight = layer.self_attn.v_proj.weight
    join_projections(model)
    assert joined_names(model) == GATED


def test_layers_with_a_computation_or_weights_of_another_kind_stay_apart() -> None:
    class Quantized(torch.Tensor):
        pass

    model = make_sharp_model("llama", 0, torch.float32)
    first, second = (layer.self_attn for layer in model.model.layers)
    first.k_proj.forward = lambda hidden: nn.functional.linear(hidden, first.k_proj.weight)
    second.v_proj.weight = nn.Parameter(second.v_proj.weight.data.as_subclass(Quantized))
    expected = logits(model)
    join_projections(model)
    assert joined_names(model) == GATED
    assert (logits(model) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("change", [copy.deepcopy, nn.Module.double], ids=["copied", "converted"])
def test_joined_layers_are_neither_copied_nor_converted(change: Callable[[Any], Any]) -> None:
    _, joined = make_models("qwen2")
    with pytest.raises(TypeError):
        change(joined)


def test_hooks_add_to_the_output_of_their_layer_alone() -> None:
    plain, joined = make_models("qwen2")
    for model in (plain, joined):
        for layer in model.model.layers:
            layer.self_attn.k_proj.register_forward_hook(lambda _, args, output: output.add_(args[0].mean()))
    assert_same(plain, joined)


def test_layers_are_apart_in_the_block_and_joined_after_it() -> None:
    plain, joined = make_models("qwen2")
    names = joined_names(joined)
    with separate_projections(joined):
        assert joined_names(joined) == set()
        assert torch.equal(logits(joined), logits(plain))
    assert joined_names(joined) == names


def test_all_layers_share_one_compiled_program_with_a_product_for_each_group() -> None:
    plain, joined = make_models("qwen2")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for layer in joined.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=backend, fullgraph=True)
    for tokens in (30, 17):
        expected = logits(plain, tokens)
        assert (logits(joined, tokens) - expected).abs().max() <= 1e-5 * expected.abs().max()
    products = [node for graph in graphs for node in graph.graph.nodes if node.target is nn.functional.linear]
    assert (len(joined.model.layers), len(graphs), len(products)) == (2, 1, 4)
    torch._dynamo.reset()


def test_groups_are_layers_that_follow_each_other_with_one_input() -> None:
    model = make_sharp_model("qwen2", 0, torch.float32)
    names = {module: name for name, module in model.named_modules()}
    groups = [[names[layer].rpartition(".")[2] for layer in group] for group in group_by_input(model)]
    layer = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert groups == [*layer, *layer, ["lm_head"]]
