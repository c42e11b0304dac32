"""The blocks of the KV cache: reference counts, and the prefix cache that finds blocks by the hash of their tokens.

A block holds the keys and values of `BLOCK_SIZE` consecutive tokens of a sequence. A full block is registered under a
hash of its tokens, all tokens before them and the weights; a request that begins with the same tokens shares it. Blocks
without references stay registered until they are allocated again, the least recently used first. No torch.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

BLOCK_SIZE = 16
"""Tokens per block."""
PADDING_BLOCK = 0
"""Never allocated: block tables are padded with it, and its content must be finite."""
TOKEN_TYPE = "i"
"""Of arrays: four bytes."""
BLOCK_BYTES = BLOCK_SIZE * array(TOKEN_TYPE).itemsize
HASH_BYTES = 16


def block_hash(previous: bytes, tokens: Sequence[int], latents: bytes = b"") -> bytes:
    """Return the hash of a block with these tokens and their latents, after the block whose hash is `previous`.

    For the first block, `previous` is what sequences must have in common to share blocks.
    """
    return blake2b(previous + array(TOKEN_TYPE, tokens).tobytes() + latents, digest_size=HASH_BYTES).digest()


def block_hashes(previous: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    """Yield the hashes of the full blocks of these tokens without latents, after the block whose hash is `previous`."""
    remaining = array(TOKEN_TYPE, tokens).tobytes()
    for end in range(BLOCK_BYTES, len(remaining) + 1, BLOCK_BYTES):
        previous = blake2b(previous + remaining[end - BLOCK_BYTES : end], digest_size=HASH_BYTES).digest()
        yield previous


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


class BlockManager:
    """Allocates `count` blocks, one of which is the padding block."""

    def __init__(self, count: int) -> None:
        if count < 2:
            raise ValueError("the KV cache needs a block besides the padding")
        self.num_usable = count - 1
        self.references = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))
        """In the order of allocation."""
        self._by_hash: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Return a block with one reference; the caller has checked `num_free`."""
        block, _ = self._free.popitem(last=False)
        self._unregister(block)
        self.references[block] = 1
        return block

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the registered blocks with these hashes, up to the first hash that none has."""
        blocks = []
        for hash in hashes:
            if (block := self._by_hash.get(hash)) is None:
                break
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a block that was found."""
        if not self.references[block]:
            del self._free[block]
        self.references[block] += 1

    def register(self, block: int, hash: bytes) -> None:
        """Let `find` return a full block; the first of two blocks with equal content is kept."""
        if hash not in self._by_hash and block not in self._hashes:
            self._by_hash[hash] = block
            self._hashes[block] = hash

    def release(self, blocks: Sequence[int], *, evict: bool = False) -> list[int]:
        """Drop a reference to each block, and return those without references; a sequence's end is reused first.

        `evict`: remove these from the prefix cache, and reuse them before all others.
        """
        freed = []
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                freed.append(block)
                if evict:
                    self._unregister(block)
                self._free[block] = None
                if block not in self._hashes:
                    self._free.move_to_end(block, last=False)
        return freed

    def evict_all(self) -> None:
        self._by_hash.clear()
        self._hashes.clear()

    def _unregister(self, block: int) -> None:
        hash = self._hashes.pop(block, None)
        if hash is not None:
            del self._by_hash[hash]
