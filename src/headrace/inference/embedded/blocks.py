"""The blocks of the KV cache: who has which, and which hold the beginning of a prompt that may come again. No torch.

A block holds the keys and values of `BLOCK` consecutive tokens of a sequence. A full one gets a name that stands for
those tokens, all before them and the weights that made it; whoever begins with the same tokens shares it. Blocks that
nobody uses keep their name until they are needed, the longest unused first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

BLOCK = 16
"""Tokens of a block."""
PADDING = 0
"""The block that nobody gets: tables are filled up with it, and what it holds must be finite."""


def root_name(*parts: object) -> bytes:
    """What the names of sequences begin with that may share blocks: the weights, an adapter, a salt."""
    return blake2b(repr(parts).encode(), digest_size=16).digest()


def next_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of the block with these tokens, after the one whose name is `before`."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


class BlockPool:
    """`count` blocks, one of which is the padding."""

    def __init__(self, count: int) -> None:
        if count < 2:
            raise ValueError("a pool needs a block besides the padding")
        self.count = count - 1
        """Those that can be had."""
        self._owners = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))
        """In the order in which they will be taken."""
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A block for oneself. Whoever takes one has looked that there is one."""
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._owners[block] = 1
        return block

    def find(self, name: bytes) -> int | None:
        return self._named.get(name)

    def is_owned(self, block: int) -> bool:
        return self._owners[block] > 0

    def share(self, block: int) -> None:
        """Become one more owner of a block that was found."""
        if not self._owners[block]:
            del self._free[block]
        self._owners[block] += 1

    def name(self, block: int, name: bytes) -> None:
        """Let others find a block that is full. The first of two that hold the same is found."""
        if name not in self._named and block not in self._names:
            self._named[name] = block
            self._names[block] = name

    def release(self, blocks: Sequence[int]) -> list[int]:
        """Stop owning them; returns those that nobody owns now. The end of a sequence is of less use than its start."""
        freed = []
        for block in reversed(blocks):
            self._owners[block] -= 1
            if not self._owners[block]:
                freed.append(block)
                self._free[block] = None
                if block not in self._names:
                    self._free.move_to_end(block, last=False)
        return freed

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody shall find these again: what they hold is not to be trusted."""
        for block in blocks:
            self._forget(block)
            if block in self._free:
                self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        self._named.clear()
        self._names.clear()

    def _forget(self, block: int) -> None:
        name = self._names.pop(block, None)
        if name is not None:
            del self._named[name]
