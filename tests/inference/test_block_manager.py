"""The block manager: small caches by hand, and random traffic against a simple model."""

import random

import pytest

from headrace.inference.embedded.block_manager import (
    BLOCK_SIZE,
    PADDING_BLOCK,
    BlockManager,
    block_hash,
    block_hashes,
    blocks_for,
)

A, B, C, D = (letter.encode() for letter in "abcd")


def filled(manager: BlockManager, *hashes: bytes) -> list[int]:
    """Allocate and register a block for each hash, in this order."""
    blocks = [manager.allocate() for _ in hashes]
    for block, hash in zip(blocks, hashes, strict=True):
        manager.register(block, hash)
    return blocks


def test_the_padding_block_is_never_allocated() -> None:
    manager = BlockManager(4)
    assert (manager.num_usable, manager.num_free) == (3, 3)
    assert [manager.allocate() for _ in range(3)] == [1, 2, 3]
    assert (manager.num_free, PADDING_BLOCK) == (0, 0)


def test_a_cache_of_only_the_padding_block_is_refused() -> None:
    with pytest.raises(ValueError):
        BlockManager(1)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_sequence_needs_a_block_for_every_sixteen_tokens(tokens: int, blocks: int) -> None:
    assert BLOCK_SIZE == 16
    assert blocks_for(tokens) == blocks


def test_unregistered_blocks_are_allocated_first_and_then_the_least_recently_used() -> None:
    manager = BlockManager(7)
    first, second = filled(manager, A), filled(manager, B)
    unregistered = [manager.allocate()]
    manager.release(second)
    manager.release(first)
    manager.release(unregistered)
    assert [manager.allocate() for _ in range(6)] == [3, 4, 5, 6, 2, 1]


def test_the_end_of_a_sequence_is_reused_before_its_beginning() -> None:
    manager = BlockManager(4)
    manager.release(filled(manager, A, B, C))
    assert [manager.allocate(), manager.find([A, B, C])] == [3, [1, 2]]
    assert [manager.allocate(), manager.find([A, B])] == [2, [1]]


def test_a_shared_block_is_free_after_its_last_release() -> None:
    manager = BlockManager(3)
    [block] = filled(manager, A)
    manager.share(block)
    assert manager.release([block]) == []
    assert (manager.num_free, (manager.references[block] > 0)) == (1, True)
    assert manager.release([block]) == [block]
    assert (manager.num_free, (manager.references[block] > 0)) == (2, False)


def test_a_free_block_that_is_found_and_shared_is_no_longer_free() -> None:
    manager = BlockManager(3)
    [block] = filled(manager, A)
    manager.release([block])
    assert manager.find([A]) == [block]
    manager.share(block)
    assert (manager.num_free, (manager.references[block] > 0)) == (1, True)
    assert manager.allocate() != block


def test_sharing_a_block_makes_it_recently_used() -> None:
    manager = BlockManager(3)
    older, newer = filled(manager, A, B)
    manager.release([older])
    manager.release([newer])
    manager.share(older)
    manager.release([older])
    assert [manager.allocate(), manager.allocate()] == [newer, older]


def test_the_first_of_two_blocks_with_equal_content_is_found() -> None:
    manager = BlockManager(4)
    first, second = filled(manager, A, A)
    assert manager.find([A]) == [first]
    manager.release([second])
    assert manager.allocate() == second  # it is not registered


def test_a_block_keeps_its_first_hash() -> None:
    manager = BlockManager(3)
    [block] = filled(manager, A)
    manager.register(block, B)
    assert (manager.find([A]), manager.find([B])) == ([block], [])


def test_evicted_blocks_are_not_found_and_reused_first() -> None:
    manager = BlockManager(4)
    first, *others = filled(manager, A, B, C)
    manager.release(others)
    manager.release([first], evict=True)
    assert (manager.find([A, B, C]), manager.find([B, C])) == ([], [2, 3])
    assert manager.allocate() == 1


def test_a_block_that_others_refer_to_is_not_evicted() -> None:
    manager = BlockManager(3)
    [block] = filled(manager, A)
    manager.share(block)
    assert manager.release([block], evict=True) == []
    assert manager.find([A]) == [block]


def test_evicting_all_keeps_references() -> None:
    manager = BlockManager(4)
    kept, left = filled(manager, A, B)
    manager.release([left])
    manager.evict_all()
    assert [manager.find([A]), manager.find([B]), manager.references[kept], manager.num_free] == [[], [], 1, 2]


def test_hashes_depend_on_tokens_all_tokens_before_and_the_root() -> None:
    roots = [b"one version", b"another version"]
    hashes = [block_hash(root, [1, 2]) for root in roots]
    hashes += [block_hash(roots[0], [1, 3]), block_hash(hashes[0], [1, 2]), block_hash(roots[0], [1]), *roots]
    assert len(set(hashes)) == len(hashes)
    assert block_hash(roots[0], [1, 2]) == hashes[0]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 50])
def test_full_blocks_have_the_hashes_that_follow_from_each_other(length: int) -> None:
    tokens = list(range(100_000, 100_000 + length))
    expected, previous = [], A
    for start in range(0, length - BLOCK_SIZE + 1, BLOCK_SIZE):
        expected.append(previous := block_hash(previous, tokens[start : start + BLOCK_SIZE]))
    assert list(block_hashes(A, tokens)) == expected


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_matches_a_model_of_lists(seed: int) -> None:
    """The model: references and a hash per block, and the free blocks in the order of reuse."""
    rng = random.Random(seed)
    manager = BlockManager(9)
    references: dict[int, int] = dict.fromkeys(range(1, 9), 0)
    hashes: dict[int, bytes] = {}
    order = list(range(1, 9))
    held: list[int] = []  # one entry per reference
    choices = [A, B, C, D, *(bytes([number]) for number in range(8))]
    for _ in range(600):
        action = rng.choice(["take", "take", "hash", "share", "share", "release", "release", "evict", "all"])
        if action == "take" and order:
            block = manager.allocate()
            assert block == order.pop(0)
            assert references[block] == 0
            hashes.pop(block, None)
            references[block] = 1
            held.append(block)
        elif action == "hash" and held:
            block, hash = rng.choice(held), rng.choice(choices)
            manager.register(block, hash)
            if hash not in hashes.values():
                hashes.setdefault(block, hash)
        elif action == "share" and hashes:
            block, hash = rng.choice([*hashes.items()])
            assert manager.find([hash]) == [block]
            manager.share(block)
            order = [other for other in order if other != block]
            references[block] += 1
            held.append(block)
        elif action in ("release", "evict") and held:
            leaving = [held.pop(rng.randrange(len(held))) for _ in range(rng.randint(1, len(held)))]
            freed = []
            for block in reversed(leaving):
                references[block] -= 1
                if not references[block]:
                    freed.append(block)
                    if action == "evict":
                        hashes.pop(block, None)
                    order = [*order, block] if block in hashes else [block, *order]
            assert manager.release(leaving, evict=action == "evict") == freed
        elif action == "all" and rng.random() < 0.1:
            manager.evict_all()
            hashes.clear()
        found = {block: hash for hash in choices for block in manager.find([hash])}
        assert found == hashes
        assert manager.num_free == len(order) == sum(not count for count in references.values())
        assert [(manager.references[block] > 0) for block in references] == [count > 0 for count in references.values()]
