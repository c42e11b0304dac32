"""Who has which row of the window: where requests that are sampled from have their keys a second time, side by side.

Attention on a CPU reads rows that lie side by side without moving anything; out of blocks it would copy every key at
every step. Rows are in rooms of one length each, so that requests of similar length attend together; whoever outgrows
a room moves to one twice as long. Blocks remain what is shared, found and given up; a row is filled from them once,
when a request begins to sample, and then grows by a token a step. Whoever finds no row reads its blocks. No tensors
here: `kv_cache` has the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headrace.inference.embedded.request import Request

SHORTEST = 128
"""Tokens of a row in the first room."""
MORE_ROWS = 8
"""Rows by which a room grows."""


class Filling(NamedTuple):
    """A row that must be filled from its request's blocks."""

    row: int
    request: Request


class Room:
    """Rows of `length` tokens, without gaps."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rows = 0
        """As many as it ever needed at once; it has gone once nobody is left in it."""
        self.requests: list[Request] = []
        """By row."""
        self.copies: list[tuple[int, int]] = []
        """Rows that must be copied, (from, to), before any is filled."""
        self.fillings: list[Filling] = []


class Window:
    """`rooms` by length; after `arrange` their copies and fillings have to be carried out.

    All rows together have at most `budget` tokens.
    """

    def __init__(self, budget: int) -> None:
        self.rooms: dict[int, Room] = {}
        self._budget = budget
        self._losses: dict[Request, int] = {}
        """How often each had lost its blocks when its row was filled: what was computed anew is not what is there."""

    def arrange(self, requests: Iterable[Request]) -> list[Room]:
        """Give these requests alone rows for all their tokens, as far as there are any; returns the rooms in use."""
        wanted = dict.fromkeys(requests)
        for room in self.rooms.values():
            self._clear_out(room, wanted)
        for request in wanted:
            if request not in self._losses:
                self._let_in(request)
        self.rooms = {length: room for length, room in self.rooms.items() if room.requests}
        return list(self.rooms.values())

    def _let_in(self, request: Request) -> None:
        length = max(SHORTEST, 1 << (len(request.tokens) - 1).bit_length())
        room = self.rooms.get(length) or Room(length)
        if len(room.requests) == room.rows:
            taken = sum(other.rows * other.length for other in self.rooms.values())
            if taken + MORE_ROWS * length > self._budget:
                return
            room.rows += MORE_ROWS
        self.rooms[length] = room
        room.fillings.append(Filling(len(room.requests), request))
        room.requests.append(request)
        self._losses[request] = request.losses

    def _clear_out(self, room: Room, wanted: dict[Request, None]) -> None:
        """Let those go who are not wanted, or have no use for their row; the last ones close the gaps."""
        room.copies, room.fillings = [], []
        leaving = {
            row
            for row, request in enumerate(room.requests)
            if request not in wanted or self._losses[request] != request.losses or len(request.tokens) > room.length
        }
        if not leaving:
            return
        for row in leaving:
            del self._losses[room.requests[row]]
        count = len(room.requests) - len(leaving)
        gaps = [row for row in sorted(leaving) if row < count]
        movers = [row for row in range(count, len(room.requests)) if row not in leaving]
        room.copies = list(zip(movers, gaps, strict=True))
        for source, target in room.copies:
            room.requests[target] = room.requests[source]
        del room.requests[count:]
