"""How sequences are laid out: every distinct prefix once, and attention over exactly a token's own past."""

import numpy as np
import torch

from headrace.trainer.row import make_row

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


def test_every_place_is_answered_by_a_query_that_sees_exactly_its_past():
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 50, 30)
    sequences = [
        np.concatenate([prompt[: rng.integers(0, 31)], rng.integers(0, 50, rng.integers(1, 20))]) for _ in range(40)
    ]
    row = make_row(sequences, CPU)
    asked, seen = [], []
    for block in row.layout.blocks:
        width = block.keys.shape[1]
        visible = torch.ones(width, width).tril().bool() if block.visible is None else block.visible[:, 0]
        visible = visible.expand(len(block.keys), *visible.shape[-2:])
        for line, queries in enumerate(block.queries):
            asked += queries.tolist()
            seen += [block.keys[line][mask].tolist() for mask in visible[line]]
    for sequence, places in zip(sequences, row.places, strict=True):
        assert row.token_ids[0, places].tolist() == sequence.tolist()
        for position, place in enumerate(places):
            query = int(row.layout.outputs[place])
            assert asked[query] == place
            assert seen[query] == places[: position + 1].tolist()


def test_one_long_sequence_does_not_pad_the_short_ones():
    row = make_row([np.arange(1000), *(np.array([2000 + n, 1]) for n in range(50))], CPU)
    assert sum(block.keys.numel() for block in row.layout.blocks) < 1500
