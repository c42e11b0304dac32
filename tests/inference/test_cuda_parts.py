"""Parts of the CUDA runner without kernels: items, rows, batch sizes, and settings around graphs."""

import gc
import random
import threading
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.inference.embedded.block_manager import BLOCK_SIZE
from headrace.inference.embedded.cuda import weight_copies
from headrace.inference.embedded.cuda.compilation import (
    MAX_MIXED_PREFILL,
    MAX_PROGRAMS,
    CompiledLayers,
    batch_sizes,
    gc_disabled,
    layers_in_use,
    mixed_sizes,
)
from headrace.inference.embedded.cuda.rows import MIN_ITEM_KEYS, UNUSED, PrefillRow, StepRows, split_into_items
from headrace.inference.embedded.cuda.weight_copies import WeightCopies
from headrace.inference.embedded.projections import join_projections
from headrace.inference.embedded.request import Request
from headrace.inference.schema import SamplingParams


def request(tokens: list[int], blocks: list[int], temperature: float = 1.0) -> Request:
    made = Request(
        tokens,
        SamplingParams(temperature=temperature),
        max_new_tokens=64,
        eos_token_ids=(),
        shared_random=random.Random(0),
        cache_salt=None,
    )
    made.blocks = blocks
    return made


def make_rows(count: int, tokens: int = 0) -> StepRows:
    return StepRows(count, tokens or count, 3, key_heads=2, tile_tokens=4, device=torch.device("cpu"))


def sent(rows: StepRows, name: str) -> list[Any]:
    found: list[Any] = getattr(rows.inputs, name).tolist()
    return found


@pytest.mark.parametrize(
    "lengths", [[1], [5, 5000], [700] * 40, [128, 129, 64, 1, 0, 9000, 33, 0], list(range(1, 400, 7))]
)
@pytest.mark.parametrize("spare", [1, 7, 256])
def test_items_cover_every_key_once_and_fit_with_those_of_long_requests_first(lengths: list[int], spare: int) -> None:
    limit = len(lengths) + spare
    items = split_into_items(np.array(lengths), limit)
    assert len(items) <= limit
    next_item = 0
    for length, row in sorted(zip(lengths, range(len(lengths)), strict=True), key=lambda each: -each[0]):
        first, count = items[next_item, 3:]
        assert first == next_item
        own = items[first : first + count]
        assert (own[:, 0] == row).all() and (own[:, 3:] == (first, count)).all()
        assert [0, *own[:-1, 2]] == own[:, 1].tolist()
        assert own[-1, 2] == length and ((own[:, 1] < own[:, 2]) | (length == 0)).all()
        next_item += count
    assert next_item == len(items)
    if sum(lengths) <= MIN_ITEM_KEYS * spare:
        assert (items[:, 2] - items[:, 1]).max() <= MIN_ITEM_KEYS


def test_sizes_of_batches_double_and_from_32_on_have_one_between() -> None:
    assert batch_sizes(1) == [2]
    assert batch_sizes(9) == [2, 4, 8, 16]
    assert batch_sizes(100) == [2, 4, 8, 16, 32, 48, 64, 96, 128]
    assert batch_sizes(96)[-1] == 96


@pytest.mark.parametrize("rows", [2, 96, 256, 1024])
def test_sizes_of_steps_with_prefill_reach_far_enough_and_waste_at_most_a_third(rows: int) -> None:
    sizes = mixed_sizes(rows)
    assert sizes[-1] >= rows + MAX_MIXED_PREFILL
    assert all(larger <= 1.5 * smaller and larger % 16 == 0 for smaller, larger in pairwise(sizes))


def test_a_prefill_has_its_last_token_in_its_row_and_the_others_after_the_rows() -> None:
    rows = make_rows(4, tokens=16)
    decode, prefill = request([9, 10, 11], [4]), request(list(range(20, 42)), [5, 2])
    rows.arrange([decode], [PrefillRow(prefill, 16, 22)], 16)
    rows.send()
    assert sent(rows, "ids") == [11, 41, 36, 37, 38, 39, 40] + [0] * 9
    assert sent(rows, "positions")[:7] == [2, 21, 16, 17, 18, 19, 20]
    begin = 2 * BLOCK_SIZE
    assert sent(rows, "slots")[:8] == [4 * BLOCK_SIZE + 2, begin + 5, *range(begin, begin + 5), UNUSED]
    assert sent(rows, "items")[:2] == [[0, 0, 3, 0, 1], [1, 0, 0, 1, 1]]  # the decode kernel has no keys of the prefill
    assert sent(rows, "tiles")[:3] == [[1, 0, 6, 16, 2], [1, 4, 6, 16, 2], [UNUSED] * 5]


def test_a_single_token_that_shares_its_block_is_computed_like_a_decode_and_not_stored() -> None:
    rows = make_rows(2)
    rows.arrange([], [PrefillRow(request([3] * 16, [7]), 15, 16, is_stored=False)], 2)
    rows.send()
    assert sent(rows, "ids")[0] == 3 and sent(rows, "positions")[0] == 15
    assert sent(rows, "slots") == [UNUSED, UNUSED]
    assert sent(rows, "items")[0] == [0, 0, 16, 0, 1]
    assert sent(rows, "tiles")[0] == [UNUSED] * 5


def test_a_token_in_flight_is_read_from_the_row_that_sampled_it() -> None:
    rows = make_rows(4)
    first, second, third = (request([number, number], [number]) for number in (1, 2, 3))
    rows.arrange([first, second, third], [], 4)
    for each in (first, second, third):
        each.append_pending()
    rows.arrange([second, third], [], 4)
    rows.send()
    assert rows.requests == [third, second]
    assert sent(rows, "sources") == [2, 1, UNUSED, UNUSED]


def test_rows_have_the_slot_of_each_last_token_and_the_rest_are_unused() -> None:
    rows = make_rows(4)
    rows.arrange([request([7] * 16 + [8], [5, 2], temperature=0.5), request([9, 10, 11], [4])], [], 4)
    rows.send()
    assert sent(rows, "ids") == [8, 11, 0, 0]
    assert sent(rows, "positions") == [16, 2, 0, 0]
    assert sent(rows, "slots") == [2 * BLOCK_SIZE, 4 * BLOCK_SIZE + 2, UNUSED, UNUSED]
    assert sent(rows, "lengths") == [17, 3, 0, 0]
    assert sent(rows, "temperatures") == [0.5, 1.0, 1.0, 1.0]
    assert rows.tables[:2].tolist() == [[5, 2, 0], [4, 0, 0]]
    items = sent(rows, "items")
    assert items[:4] == [[0, 0, 17, 0, 1], [1, 0, 3, 1, 1], [2, 0, 0, 2, 1], [3, 0, 0, 3, 1]]
    assert {item[0] for item in items[4:]} == {UNUSED}


def test_the_last_row_takes_the_place_of_a_request_that_leaves() -> None:
    rows = make_rows(4)
    first, second, third = (request([number, number], [number]) for number in (1, 2, 3))
    rows.arrange([first, second, third], [], 4)
    rows.send()
    third.tokens += [6] * 15
    third.blocks.append(9)
    rows.arrange([second, third], [], 2)
    rows.send()
    assert rows.requests == [third, second]
    assert sent(rows, "ids")[:2] == [6, 2]
    assert sent(rows, "slots")[:2] == [9 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1]
    assert rows.tables[:2, :2].tolist() == [[3, 9], [2, 0]]


def test_the_table_of_a_request_is_rewritten_after_a_reset() -> None:
    rows = make_rows(2)
    one = request([1, 2], [5])
    rows.arrange([one], [], 2)
    one.reset_computed()
    one.blocks = [7]
    rows.arrange([one], [], 2)
    rows.send()
    assert rows.tables[0, 0] == 7
    assert sent(rows, "slots")[0] == 7 * BLOCK_SIZE + 1


@pytest.mark.parametrize("was_on", [True, False])
def test_nothing_is_collected_while_a_graph_is_captured(was_on: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with gc_disabled():
            assert not gc.isenabled()
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()


def test_layers_may_have_many_programs_on_whichever_thread_computes(model: Any) -> None:
    layers = CompiledLayers(model)
    limits = []

    def compute() -> None:
        with layers.compiled():
            limits.append(torch._dynamo.config.recompile_limit)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert limits[0] >= MAX_PROGRAMS


def make_model() -> Any:
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_layers_are_in_the_order_of_their_use() -> None:
    model = make_model()
    model.model.layers = torch.nn.ModuleList(reversed(model.model.layers))
    assert layers_in_use(model, lambda: model(torch.zeros(1, 2, dtype=torch.long))) == [*model.model.layers]


def test_layers_that_are_used_twice_or_within_others_are_no_sequence() -> None:
    model = make_model()
    tokens = torch.zeros(1, 2, dtype=torch.long)
    assert layers_in_use(model, lambda: [model(tokens) for _ in range(2)]) == []
    first, second, *others = model.model.layers
    model.model.layers = torch.nn.ModuleList([first, *others])
    first.inner, plain = second, first.forward
    first.forward = lambda hidden, **settings: plain(first.inner(hidden, **settings), **settings)
    assert layers_in_use(model, lambda: model(tokens)) == []


class FakeStream:
    def wait_event(self, _: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event


def test_halves_of_the_layers_are_copied_apart_from_what_a_step_uses_at_both_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups: list[list[str]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream())
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    model = make_model()
    layers = model.model.layers
    layers[4].input_layernorm.weight = layers[0].input_layernorm.weight
    layers[1].input_layernorm.weight = model.model.norm.weight
    join_projections(model)
    parameters = model.state_dict()
    sources = {name: tensor.clone() for name, tensor in parameters.items()}
    names = {id(tensor): name.removeprefix("model.") for name, tensor in sources.items()}
    monkeypatch.setattr(weight_copies, "copy_tensors", lambda pairs: groups.append([names[id(b)] for _, b in pairs]))
    WeightCopies(model, layers, torch.device("cpu")).copy([(parameters[name], sources[name]) for name in sources])
    first, others, second = groups
    assert {name.split(".")[1] for name in first} == {"0", "1"}
    assert {name.split(".")[1] for name in second} == {"2", "3", "4"}
    shared = {"embed_tokens.weight", "lm_head.weight", "norm.weight"}
    assert {*others} == shared | {f"layers.{number}.input_layernorm.weight" for number in (0, 1, 4)}
    assert sorted(first + others + second) == sorted(names.values())
