"""Compiled layers compute the same, as one program for all layers and all lengths of a row."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch._inductor.utils import fresh_cache
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from headrace.trainer.attention import _attend
from headrace.trainer.layers import checkpoint_layers, compile_layers, offload_activations
from headrace.trainer.lm_head import hidden_states
from headrace.trainer.packed_row import Kernel, PackedRow, make_row
from headrace.trainer.ranks import Ranks
from headrace.trainer.warmup import warmup_rows
from tests.trainer.packed_modules import backward_through, packed_module, sequences_that_share
from tests.trainer.plain_kernels import use_plain_kernels

CPU = torch.device("cpu")
LENGTHS = (50, 33, 64, 71, 100, 12)
KINDS = (sequences_that_share(), sequences_that_share(2)[1:], sequences_that_share()[3:], sequences_that_share()[:1])
"""Two rows that share, one that does not, and one of a single sequence."""


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plain_kernels(monkeypatch)


@pytest.fixture(autouse=True)
def counters() -> Iterator[dict[str, int]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()


def one_sequence(length: int, kernel: Kernel) -> PackedRow:
    return make_row([np.random.default_rng(length).integers(0, 96, length)], CPU, kernel)


def assert_close(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, grad in expected.items():
        torch.testing.assert_close(given[name], grad, atol=1e-5 * float(grad.abs().max()), rtol=0)


@pytest.mark.parametrize(("sharded", "programs"), [(False, 1), (True, 2)])
def test_all_lengths_are_one_program_for_all_layers_or_two_of_sharded_ones(counters, sharded: bool, programs: int):
    """Without the code generator, which does not change what is compiled how often."""
    module, plain = packed_module("qwen3", layers=3), packed_module("qwen3", layers=3)
    compile_layers(module.model.layers, backend="eager", sharded=sharded)
    for length in LENGTHS:
        _, grads = backward_through(module, one_sequence(length, "flash"))
        assert_close(grads, backward_through(plain, one_sequence(length, "sdpa"))[1])
    assert counters["unique_graphs"] == programs


@pytest.mark.parametrize(("sharded", "programs"), [(False, 1), (True, 2)])
def test_every_row_of_a_step_runs_the_program_of_the_warmup(counters, sharded: bool, programs: int):
    """Without the code generator; with layers that are taken for sharded."""
    module = packed_module("qwen3", layers=2)
    compile_layers(module.model.layers, backend="eager", sharded=sharded)

    def run(sequences: list[np.ndarray]) -> None:
        with torch.no_grad():
            hidden_states(module, make_row(sequences, CPU, "cudnn"))

    for samples in warmup_rows(96, seq_len=384, tokens=600):
        run([sample.token_ids[:-1] for sample in samples])
    rng = np.random.default_rng(0)
    for count in (2, 3, 8, 30):
        prompt = rng.integers(0, 96, int(rng.integers(20, 200)))
        completions = [rng.integers(0, 96, int(rng.integers(5, 60))) for _ in range(count)]
        run([np.concatenate([prompt, completion]) for completion in completions])
        run(completions)
        run([prompt])
    assert counters["unique_graphs"] == programs


@pytest.mark.full
@pytest.mark.parametrize("checkpointing", ["none", "full", "attention", "selective"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_layers_compile_with_all_that_is_wrapped_around_them(
    counters, checkpointing: str, offload: bool, sharded: bool
):
    module, plain = packed_module("qwen3", layers=3), packed_module("qwen3", layers=3)
    if checkpointing != "none":
        checkpoint_layers(module.model.layers, checkpointing)
    compile_layers(module.model.layers, backend="aot_eager", sharded=sharded)
    if offload:
        offload_activations(module.model.layers, min_bytes=1)
    if sharded:
        for part in (*module.model.layers, module.model):
            fully_shard(part, mesh=Ranks().mesh())
    for sequences in KINDS:
        _, grads = backward_through(module, make_row(sequences, CPU, "flash"))
        assert_close(
            {name: whole(grad) for name, grad in grads.items()},
            backward_through(plain, make_row(sequences, CPU))[1],
        )
    assert counters["unique_graphs"] == (2 if sharded else 1)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["sdpa", "flash"])
def test_generated_code_computes_the_same(kernel: Kernel):
    module, plain = packed_module("qwen3", layers=2), packed_module("qwen3", layers=2)
    compile_layers(module.model.layers)
    for sequences in KINDS:
        _, grads = backward_through(module, make_row(sequences, CPU, kernel))
        assert_close(grads, backward_through(plain, make_row(sequences, CPU))[1])


class AttentionLayer(torch.nn.Module):
    """A layer of operators that exist, so that the code generator has nothing to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling = 0.3
        self.first, self.second = (torch.nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, hidden: torch.Tensor, keys: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        query, key = self.first(hidden).unsqueeze(1), hidden.detach().unsqueeze(1)
        tokens = len(hidden)
        states, _ = _attend(query, key, key, keys, starts, starts, tokens, tokens, False, self.scaling, None)
        return self.second(states.flatten(1))


def test_each_kind_of_layer_is_traced_once_and_comes_from_the_cache_in_the_next_run():
    tracings = torch._dynamo.utils.counters["aot_autograd"]
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            tracings.clear()
            layers = [AttentionLayer() for _ in range(6)]
            checkpoint_layers(layers[:2], "attention")
            checkpoint_layers(layers[2:4], "selective")
            compile_layers(layers)
            for length in (5, 9, 12):
                hidden, starts = (
                    torch.randn(length, 16, requires_grad=True),
                    torch.tensor([0, length], dtype=torch.int32),
                )
                for layer in layers:
                    hidden = layer(hidden, torch.arange(length), starts)
                hidden.sum().backward()
            assert tracings["total"] == 3
    assert (tracings["autograd_cache_hit"], tracings["autograd_cache_miss"]) == (3, 0)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
