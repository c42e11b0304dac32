"""How sequences are laid out: every distinct prefix once, and attention over exactly a token's own past."""

import numpy as np
import pytest
import torch

from headrace.trainer.packed_row import Kernel, make_row, prefix_keys

CPU = torch.device("cpu")


def row_of(*sequences: list[int]):
    return make_row([np.array(sequence) for sequence in sequences], CPU)


def test_sequences_keep_their_own_order_and_share_prefixes():
    row = row_of([5, 6, 9], [1, 2], [5, 6, 7, 8])
    assert row.token_ids.tolist() == [[1, 2, 5, 6, 7, 8, 9]]
    assert row.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 2]]
    assert [places.tolist() for places in row.places] == [[2, 3, 6], [0, 1], [2, 3, 4, 5]]


def test_equal_sequences_and_prefixes_of_others_cost_nothing():
    row = row_of([3, 4, 5], [3, 4], [3, 4, 5])
    assert row.token_ids.tolist() == [[3, 4, 5]]
    assert [places.tolist() for places in row.places] == [[0, 1, 2], [0, 1], [0, 1, 2]]


def test_same_tokens_after_different_prefixes_are_not_shared():
    row = row_of([1, 7, 7], [2, 7, 7])
    assert row.token_ids.tolist() == [[1, 7, 7, 2, 7, 7]]


def test_order_is_by_token_and_not_by_its_bytes():
    assert row_of([256], [1], [65536]).token_ids.tolist() == [[1, 256, 65536]]


def overlapping_sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 50, 30)
    return [
        np.concatenate([prompt[: rng.integers(0, 31)], rng.integers(0, 50, rng.integers(1, 20))]) for _ in range(40)
    ]


@pytest.mark.parametrize("window", [None, 1, 7])
def test_every_place_is_answered_by_a_query_that_sees_exactly_its_past(window: int | None):
    sequences = overlapping_sequences()
    row = make_row(sequences, CPU)
    blocks = row.layout.sequences
    asked, seen = [], []
    for block, visible in zip(blocks.blocks, blocks.visible(window), strict=True):
        width = block.keys.shape[1]
        visible = torch.ones(width, width).tril().bool() if visible is None else visible[:, 0]
        visible = visible.expand(len(block.keys), *visible.shape[-2:])
        assert visible.any(-1).all()  # padding, too, sees something
        for line, queries in enumerate(block.queries):
            asked += queries.tolist()
            seen += [block.keys[line][mask].tolist() for mask in visible[line]]
    for sequence, places in zip(sequences, row.places, strict=True):
        assert row.token_ids[0, places].tolist() == sequence.tolist()
        for position, place in enumerate(places):
            query = int(blocks.outputs[place])
            assert asked[query] == place
            assert seen[query] == places[: position + 1][-(window or 1000) :].tolist()


def test_masks_are_made_once_for_each_window():
    blocks = make_row(overlapping_sequences(), CPU).layout.sequences
    assert blocks.visible(7) is blocks.visible(7)
    assert blocks.visible(None) is not blocks.visible(7)


def test_runs_end_with_their_queries_and_hold_exactly_the_past_of_each():
    sequences = overlapping_sequences()
    row = make_row(sequences, CPU, "flash")
    runs = row.layout.sequences
    past = {}
    for start, stop, first, end in zip(
        runs.query_starts[:-1], runs.query_starts[1:], runs.key_starts[:-1], runs.key_starts[1:], strict=True
    ):
        keys = runs.keys[first:end].tolist()
        asking = range(int(start), int(stop))
        assert len(asking) <= runs.longest_query
        assert len(keys) <= runs.longest_key
        for behind, place in enumerate(reversed(asking)):
            past[place] = keys[: len(keys) - behind]
    assert sorted(past) == list(range(row.token_ids.shape[1]))
    for places in row.places:
        for position, place in enumerate(places):
            assert past[place] == places[: position + 1].tolist()


def test_runs_that_share_nothing_are_the_row_itself():
    runs = make_row([np.array([5, 6]), np.array([1, 2, 3]), np.array([5])], CPU, "flash").layout.sequences
    assert runs.keys.tolist() == list(range(5))
    assert runs.query_starts.tolist() == runs.key_starts.tolist() == [0, 3, 5]
    assert (runs.longest_query, runs.longest_key) == (3, 3)
    one = make_row([np.array([5, 6]), np.array([5])], CPU, "flash").layout.sequences
    assert one.query_starts.tolist() == [0, 2]


@pytest.mark.parametrize(("kernel", "padded"), [("cudnn", 512), ("flash", 3)])
def test_a_row_of_one_sequence_is_padded_where_cudnn_reads_it(kernel: Kernel, padded: int):
    row = make_row([np.array([5, 6, 7]), np.array([5, 6])], CPU, kernel)
    assert row.token_ids.tolist() == [[5, 6, 7] + [0] * (padded - 3)]
    assert row.position_ids.tolist() == [[0, 1] + [2] * (padded - 2)]
    assert [places.tolist() for places in row.places] == [[0, 1, 2], [0, 1]]
    assert row.layout.longest == 3
    assert row.layout.sequences.query_starts.tolist() == [0, padded]


def test_a_row_of_several_sequences_is_never_padded():
    assert make_row([np.array([5, 6, 7]), np.array([8])], CPU, "cudnn").token_ids.tolist() == [[5, 6, 7, 8]]


def test_one_long_sequence_does_not_pad_the_short_ones():
    row = make_row([np.arange(1000), *(np.array([2000 + n, 1]) for n in range(50))], CPU)
    assert sum(block.keys.numel() for block in row.layout.sequences.blocks) < 1500


def test_a_prefix_is_shared_only_where_its_latents_are_equal():
    tokens = [np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]), np.array([1, 2, 3, 6]), np.array([1, 2])]
    latents = [np.zeros((len(each), 2), np.float16) for each in tokens]
    latents[0][1] = latents[1][1] = [0.5, 0]
    latents[2][1] = [0, 0.5]
    keys = prefix_keys(np.concatenate(tokens), np.concatenate(latents))
    ends = np.cumsum([len(each) for each in tokens])
    row = make_row(tokens, CPU, keys=np.split(keys, ends[:-1]), latents=latents)
    first, second, third, plain = (places.tolist() for places in row.places)
    assert first[:3] == second[:3]
    assert first[0] == third[0] == plain[0] and len({first[1], third[1], plain[1]}) == 3
    assert third[2] != first[2]  # the same token after another prefix
    assert row.latents is not None and len(row.latents) == row.token_ids.shape[1]
    for places, ids, rows in zip(row.places, tokens, latents, strict=True):
        assert row.token_ids[0, places].tolist() == ids.tolist()
        assert row.latents[places].tolist() == rows.tolist()


def test_tokens_with_other_routes_have_other_keys():
    tokens, experts = np.arange(300), np.arange(8, dtype=np.uint8)
    routes = np.stack(np.meshgrid(experts, experts, [0, 255]), -1).reshape(-1, 3).astype(np.uint8)
    keys = prefix_keys(np.repeat(tokens, len(routes)), np.tile(routes, (len(tokens), 1)))
    assert len(np.unique(keys)) == len(tokens) * len(routes)
    assert np.array_equal(keys, prefix_keys(np.repeat(tokens, len(routes)), np.tile(routes, (len(tokens), 1))))
