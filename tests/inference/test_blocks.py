"""Who has which block of the KV cache: small pools by hand, and random traffic against a model of its own."""

import random

import pytest

from headrace.inference.embedded.blocks import BLOCK, PADDING, BlockPool, blocks_for, next_name, root_name

A, B, C, D = (root_name(letter) for letter in "abcd")


def filled(pool: BlockPool, *names: bytes) -> list[int]:
    """A block for each name, taken in this order."""
    blocks = [pool.take() for _ in names]
    for block, name in zip(blocks, names, strict=True):
        pool.name(block, name)
    return blocks


def test_the_padding_is_never_taken() -> None:
    pool = BlockPool(4)
    assert (pool.count, pool.free) == (3, 3)
    assert [pool.take() for _ in range(3)] == [1, 2, 3]
    assert (pool.free, PADDING) == (0, 0)


def test_a_pool_of_the_padding_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="besides the padding"):
        BlockPool(1)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_sequence_needs_a_block_for_every_sixteen_tokens(tokens: int, blocks: int) -> None:
    assert BLOCK == 16
    assert blocks_for(tokens) == blocks


def test_nameless_blocks_are_taken_before_those_that_may_be_found_and_these_longest_unused_first() -> None:
    pool = BlockPool(7)
    first, second = filled(pool, A), filled(pool, B)
    nameless = [pool.take()]
    pool.release(second)
    pool.release(first)
    pool.release(nameless)
    assert [pool.take() for _ in range(6)] == [3, 4, 5, 6, 2, 1]


def test_the_end_of_a_sequence_is_taken_before_its_beginning() -> None:
    pool = BlockPool(4)
    pool.release(filled(pool, A, B, C))
    assert [pool.take(), pool.find(A), pool.find(B), pool.find(C)] == [3, 1, 2, None]
    assert [pool.take(), pool.find(A), pool.find(B)] == [2, 1, None]


def test_a_shared_block_is_free_once_its_last_owner_has_gone() -> None:
    pool = BlockPool(3)
    [block] = filled(pool, A)
    pool.share(block)
    assert pool.release([block]) == []
    assert (pool.free, pool.is_owned(block)) == (1, True)
    assert pool.release([block]) == [block]
    assert (pool.free, pool.is_owned(block)) == (2, False)


def test_a_block_that_is_found_after_its_owner_has_gone_is_no_longer_free() -> None:
    pool = BlockPool(3)
    [block] = filled(pool, A)
    pool.release([block])
    assert pool.find(A) == block
    pool.share(block)
    assert (pool.free, pool.is_owned(block)) == (1, True)
    assert pool.take() != block


def test_a_block_that_was_found_again_counts_as_used_again() -> None:
    pool = BlockPool(3)
    older, newer = filled(pool, A, B)
    pool.release([older])
    pool.release([newer])
    pool.share(older)
    pool.release([older])
    assert [pool.take(), pool.take()] == [newer, older]


def test_the_first_of_two_blocks_that_hold_the_same_is_found() -> None:
    pool = BlockPool(4)
    first, second = filled(pool, A, A)
    assert pool.find(A) == first
    pool.release([second])
    assert pool.take() == second  # it has no name to keep


def test_a_block_keeps_its_first_name() -> None:
    pool = BlockPool(3)
    [block] = filled(pool, A)
    pool.name(block, B)
    assert (pool.find(A), pool.find(B)) == (block, None)


def test_what_is_forgotten_is_not_found_and_taken_first() -> None:
    pool = BlockPool(4)
    pool.release(filled(pool, A, B, C))
    pool.forget([1])
    assert (pool.find(A), pool.find(B), pool.find(C)) == (None, 2, 3)
    assert pool.take() == 1


def test_a_block_may_be_forgotten_while_it_is_owned_and_named_anew() -> None:
    pool = BlockPool(3)
    [block] = filled(pool, A)
    pool.forget([block])
    assert (pool.find(A), pool.is_owned(block)) == (None, True)
    pool.name(block, B)
    assert pool.find(B) == block


def test_forgetting_all_leaves_owners_theirs() -> None:
    pool = BlockPool(4)
    kept, left = filled(pool, A, B)
    pool.release([left])
    pool.forget_all()
    assert [pool.find(A), pool.find(B), pool.is_owned(kept), pool.free] == [None, None, True, 2]


def test_names_stand_for_the_tokens_all_before_them_and_the_root() -> None:
    roots = [root_name("0-1", None, None), root_name("0-1", None, "salt"), root_name("0-1", "salt", None)]
    names = [next_name(root, [1, 2]) for root in roots]
    names += [next_name(roots[0], [1, 3]), next_name(names[0], [1, 2]), next_name(roots[0], [1]), *roots]
    assert len(set(names)) == len(names)
    assert next_name(roots[0], [1, 2]) == names[0]


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_is_what_lists_would_make_of_it(seed: int) -> None:
    """The model: owners by block, a name per block, and the free ones in the order of their use."""
    rng = random.Random(seed)
    pool = BlockPool(9)
    owners: dict[int, int] = dict.fromkeys(range(1, 9), 0)
    names: dict[int, bytes] = {}
    order = list(range(1, 9))
    held: list[int] = []  # one entry per owner
    choices = [A, B, C, D, *(root_name(number) for number in range(8))]
    for _ in range(600):
        action = rng.choice(["take", "take", "name", "share", "share", "release", "release", "forget", "all"])
        if action == "take" and order:
            block = pool.take()
            assert block == order.pop(0)
            assert owners[block] == 0
            names.pop(block, None)
            owners[block] = 1
            held.append(block)
        elif action == "name" and held:
            block, name = rng.choice(held), rng.choice(choices)
            pool.name(block, name)
            if name not in names.values():
                names.setdefault(block, name)
        elif action == "share" and names:
            block, name = rng.choice([*names.items()])
            assert pool.find(name) == block
            pool.share(block)
            order = [other for other in order if other != block]
            owners[block] += 1
            held.append(block)
        elif action == "release" and held:
            leaving = [held.pop(rng.randrange(len(held))) for _ in range(rng.randint(1, len(held)))]
            freed = []
            for block in reversed(leaving):
                owners[block] -= 1
                if not owners[block]:
                    freed.append(block)
                    order = [*order, block] if block in names else [block, *order]
            assert pool.release(leaving) == freed
        elif action == "forget" and names:
            block = rng.choice([*names])
            pool.forget([block])
            del names[block]
            if block in order:
                order = [block, *(other for other in order if other != block)]
        elif action == "all" and rng.random() < 0.1:
            pool.forget_all()
            names.clear()
        found = {block: name for name in choices if (block := pool.find(name)) is not None}
        assert found == names
        assert pool.free == len(order) == sum(not count for count in owners.values())
        assert [pool.is_owned(block) for block in owners] == [count > 0 for count in owners.values()]
