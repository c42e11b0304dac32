"""The chunks of a step as tensors, worked by hand."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headrace.inference.embedded import batch as batch_module
from headrace.inference.embedded.batch import AttentionGroup, Batch, KVWindow, group_by_shape, make_batch, padded_width
from headrace.inference.embedded.block_manager import BLOCK_SIZE, PADDING_BLOCK, blocks_for
from headrace.inference.embedded.request import Request
from headrace.inference.embedded.scheduler import Chunk
from headrace.inference.schema import SamplingParams

CPU = torch.device("cpu")


def chunk(start: int, end: int, blocks: Sequence[int] | None = None, first: int = 100) -> Chunk:
    """Tokens [start, end) of a request that has the tokens `first`, `first` + 1, ..."""
    request = Request(
        list(range(first, first + end)),
        SamplingParams(),
        max_new_tokens=1,
        eos_token_ids=(),
        shared_random=random.Random(0),
        cache_salt=None,
    )
    request.blocks = list(range(1, 1 + blocks_for(end)) if blocks is None else blocks)
    return Chunk(request, start, end)


def batch_of(*chunks: Chunk, **options: Any) -> Batch:
    return make_batch(chunks, CPU, torch.float32, **options)


def seen(group: AttentionGroup, window: int | None = None) -> list[list[list[int]]]:
    """The keys that each query of each chunk sees."""
    mask = group.mask(window)
    assert mask is not None
    assert mask.shape == (group.count, 1, group.width, group.keys)
    assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
    return [[row.eq(0).nonzero()[:, 0].tolist() for row in rows[0]] for rows in mask]


@pytest.mark.parametrize(
    ("length", "width"),
    [(2, 16), (16, 16), (17, 32), (64, 64), (100, 112), (127, 128), (129, 160), (161, 192), (512, 512), (257, 320)],
)
def test_chunks_are_padded_by_a_quarter_at_most_or_to_whole_blocks(length: int, width: int) -> None:
    assert padded_width(length) == width


def test_padding_is_bounded_for_every_length() -> None:
    for length in range(2, 3000):
        width = padded_width(length)
        assert length <= width < max(length + BLOCK_SIZE, 1.25 * length + 1)
        assert width % BLOCK_SIZE == 0


def test_tokens_positions_and_slots_are_in_the_order_of_the_groups() -> None:
    prompt = chunk(0, 3, [5], first=10)
    newest = chunk(17, 18, [7, 3], first=50)
    batch = batch_of(prompt, newest)
    assert batch.chunks == [newest, prompt]  # single tokens come first
    assert batch.ids.tolist() == [67, 10, 11, 12]
    assert batch.positions.tolist() == [17, 0, 1, 2]
    assert batch.slots.tolist() == [3 * 16 + 1, 80, 81, 82]
    assert [(group.begin, group.end) for group in batch.groups] == [(0, 1), (1, 4)]


def test_the_slots_of_a_chunk_follow_its_blocks() -> None:
    batch = batch_of(chunk(14, 34, [9, 2, 6]))
    assert batch.slots.tolist() == [9 * 16 + 14, 9 * 16 + 15, *range(32, 48), 96, 97]


def test_decode_tokens_attend_to_all_tokens_before_them_through_their_blocks() -> None:
    batch = batch_of(chunk(20, 21, [4, 8]), chunk(2, 3, [5]))
    [group] = batch.groups
    assert (group.count, group.width, group.keys, group.is_causal) == (2, 1, 32, False)
    assert (group.padded, group.kept) == (None, None)
    assert group.blocks is not None
    assert group.blocks.tolist() == [[5, PADDING_BLOCK], [4, 8]]  # the shortest first
    assert group.positions.tolist() == [[2], [20]]
    assert seen(group) == [[[0, 1, 2]], [list(range(21))]]


def test_a_prompt_from_its_beginning_is_causal_and_needs_no_mask() -> None:
    [group] = batch_of(chunk(0, 16, [3]), chunk(0, 16, [4])).groups
    assert (group.count, group.width, group.keys, group.is_causal) == (2, 16, 16, True)
    assert group.mask(None) is None
    assert group.mask(16) is None  # a window as wide as the keys hides none
    assert seen(group, 3)[0][:5] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_prompts_of_different_lengths_are_padded_with_their_own_last_token() -> None:
    batch = batch_of(chunk(0, 3, [5], first=10), chunk(0, 16, [6], first=30))
    [group] = batch.groups
    assert batch.ids.tolist() == [10, 11, 12, *range(30, 46)]
    assert group.padded is not None and group.kept is not None
    assert group.padded.tolist() == [0, 1, 2, *[2] * 13, *range(3, 19)]
    assert group.kept.tolist() == [0, 1, 2, *range(16, 32)]
    assert group.padded[group.kept].tolist() == list(range(19))


def test_padding_indices_count_from_a_groups_place_in_the_batch() -> None:
    batch = batch_of(chunk(4, 5), chunk(0, 2))
    first, second = batch.groups
    assert (first.padded, second.begin, second.end) == (None, 1, 3)
    assert second.padded is not None
    assert second.padded.tolist() == [1, *[2] * 15]


def test_a_later_chunk_sees_what_was_computed_before_and_itself() -> None:
    [group] = batch_of(chunk(32, 34, [4, 5, 6])).groups
    assert (group.width, group.keys, group.is_causal) == (16, 48, False)
    assert group.blocks is not None and group.blocks.tolist() == [[4, 5, 6]]
    assert seen(group)[0][:2] == [list(range(33)), list(range(34))]
    assert seen(group, 4)[0][:2] == [[29, 30, 31, 32], [30, 31, 32, 33]]


def test_a_window_leaves_that_many_keys_with_the_querys_own() -> None:
    [group] = batch_of(chunk(20, 21), chunk(40, 41)).groups
    assert seen(group, 5) == [[[16, 17, 18, 19, 20]], [[36, 37, 38, 39, 40]]]
    assert seen(group, 1) == [[[20]], [[40]]]


def test_masks_are_made_once_per_window() -> None:
    [group] = batch_of(chunk(20, 21)).groups
    assert group.mask(5) is group.mask(5)
    assert group.mask(None) is group.mask(1000)
    assert group.mask(5) is not group.mask(None)


def test_masks_have_the_models_type() -> None:
    [group] = make_batch([chunk(20, 21)], CPU, torch.bfloat16).groups
    mask = group.mask(None)
    assert mask is not None and mask.dtype == torch.bfloat16


def test_a_token_that_is_computed_twice_is_there_twice_and_attends_once() -> None:
    batch = batch_of(chunk(20, 21, [3, 4]), doubled=True)
    assert (batch.ids.tolist(), batch.positions.tolist(), batch.slots.tolist()) == ([120] * 2, [20] * 2, [68] * 2)
    assert [(group.begin, group.end, group.count) for group in batch.groups] == [(0, 1, 1)]


def test_a_last_chunk_of_one_token_is_grouped_with_decode() -> None:
    groups = [*group_by_shape([chunk(512, 513), chunk(0, 30), chunk(7, 8), chunk(0, 1)])]
    assert [(width, [(each.start, each.end) for each in alike]) for width, alike in groups] == [
        (1, [(0, 1), (7, 8), (512, 513)]),
        (32, [(0, 30)]),
    ]


def test_later_chunks_attend_apart_from_first_ones_and_from_those_of_another_reach() -> None:
    spans = [(0, 32), (32, 64), (32, 63), (480, 512), (0, 31)]
    groups = [*group_by_shape([chunk(*span) for span in spans])]
    assert [[(each.start, each.end) for each in alike] for _, alike in groups] == [
        [(0, 32), (0, 31)],
        [(32, 64)],  # 64 needs a bit more than 63
        [(32, 63)],
        [(480, 512)],
    ]


def test_decode_tokens_of_very_different_lengths_form_groups_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "FREE_PADDING_KEYS", 100)
    lengths = [1000, 10, 12, 14, 900]
    groups = [*group_by_shape([chunk(length - 1, length) for length in lengths])]
    # 14 * 3 <= 1.25 * 36 + 100, but 900 * 4 > 1.25 * 936 + 100; and 1000 * 2 <= 1.25 * 1900 + 100
    assert [[each.end for each in alike] for _, alike in groups] == [[10, 12, 14], [900, 1000]]


def test_few_keys_are_not_worth_another_group() -> None:
    groups = [*group_by_shape([chunk(length - 1, length) for length in (1, 1500)])]
    assert len(groups) == 1  # 1500 * 2 <= 1.25 * 1501 + 2048


@pytest.mark.parametrize("seed", range(5))
def test_every_token_of_random_chunks_is_there_once_and_sees_what_it_should(seed: int) -> None:
    rng = random.Random(seed)
    numbers = itertools.count(1)
    chunks = []
    for number in range(12):
        start = rng.choice([0, 0, 16, 37, 200])
        end = start + rng.choice([1, 1, 2, 15, 40, 100])
        chunks.append(chunk(start, end, [next(numbers) for _ in range(blocks_for(end))], first=1000 * number))
    batch = batch_of(*chunks)
    assert sorted(batch.chunks, key=chunks.index) == chunks
    expected = [
        (request.tokens[place], place) for request, start, end, _ in batch.chunks for place in range(start, end)
    ]
    assert [*zip(batch.ids.tolist(), batch.positions.tolist(), strict=True)] == expected
    assert len(set(batch.slots.tolist())) == len(expected)
    assert [group.begin for group in batch.groups] == [0, *(group.end for group in batch.groups[:-1])]
    holder = {
        request.blocks[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE: (request, place)
        for request, _, end, _ in chunks
        for place in range(end)
    }
    row = 0
    for group in batch.groups:
        assert group.blocks is not None
        tables = group.blocks
        for (request, start, end, _), table, positions in zip(
            batch.chunks[row : row + group.count], tables.tolist(), group.positions.tolist(), strict=True
        ):
            for column in range(end - start):
                assert positions[column] == start + column
                for key in range(start + column + 1):
                    assert holder[table[key // BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE] == (request, key)
        row += group.count
    assert row == len(chunks)


def newest(request: Request) -> Chunk:
    return Chunk(request, len(request.tokens) - 1, len(request.tokens), is_decode=True)


def test_decode_tokens_attend_in_their_window_buckets_before_all_others() -> None:
    window = KVWindow(1 << 20)
    long, short = chunk(199, 200).request, chunk(4, 5).request
    prompt, alone = chunk(0, 2), chunk(8, 9)
    batch = make_batch([newest(long), prompt, alone, newest(short)], CPU, torch.float32, window)
    assert [each.request for each in batch.chunks] == [long, short, alone.request, prompt.request]
    first, second, third, _ = batch.groups
    assert first.bucket is not None and second.bucket is not None and third.bucket is None
    assert (first.bucket.length, second.bucket.length) == (256, 128)
    assert (first.keys, second.keys, first.count, second.count) == (208, 16, 1, 1)
    assert first.bucket_slots is not None and first.bucket_slots.tolist() == [199]
    batch = make_batch([newest(short), newest(chunk(10, 11).request)], CPU, torch.float32, window)
    [group] = batch.groups
    assert group.bucket_slots is not None and group.bucket_slots.tolist() == [4, 128 + 10]
    assert seen(group) == [[[0, 1, 2, 3, 4]], [list(range(11))]]
