"""Environments that are left alone for a while because they only fail, so that they do not hold the others' permits.

An environment whose last `PATIENCE` episodes all failed rests: the draws that would have been its own go to the others.
Then one draw tries it again; while that fails, the rests grow. Everything is counted in draws, not in seconds: so it is
a function of what became of the draws, and a resumed run knows it again. Where all of them rest, none does: whether a
run is over for its failures is not decided here.
"""

from __future__ import annotations

import msgspec

PATIENCE = 16
"""Failed episodes in a row."""
FIRST_REST = 16
LONGEST_REST = 1024
"""In draws of the whole run."""


class _State(msgspec.Struct):
    failed: int = 0
    """Episodes since one last ended well."""
    rest: int = 0
    """How long it rests; 0: it does not."""
    until: int = 0
    trial: int | None = None
    """The draw that tries it again."""
    worked: int = -1
    """The newest draw that ended well."""


class Circuit:
    """By environment; it is told of draws as they are made, and of what became of them in any order."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def rests(self, env: str, draw: int) -> bool:
        """Whether draw number `draw` shall be of another environment."""
        state = self._of(env)
        return bool(state.rest) and (draw < state.until or state.trial is not None)

    def drawn(self, env: str, draw: int) -> None:
        state = self._of(env)
        if state.rest and draw >= state.until and state.trial is None:
            state.trial = draw

    def worked(self, env: str, draw: int) -> bool:
        """An episode ended well. True if the environment had been at rest."""
        state = self._of(env)
        if state.failed:
            self._states[env] = _State()
        self._states[env].worked = max(draw, state.worked)
        return state.rest > 0

    def failed(self, env: str, draw: int, episodes: int) -> int:
        """All the episodes of a draw failed. How many draws the environment rests from there on; 0: nothing new."""
        state = self._of(env)
        self.given_up(env, draw)
        if draw < state.worked:
            return 0
        state.failed += episodes
        if state.failed < PATIENCE or draw < state.until:
            return 0
        state.rest = min(2 * state.rest, LONGEST_REST) if state.rest else FIRST_REST
        state.until = draw + 1 + state.rest
        return state.rest

    def given_up(self, env: str, draw: int) -> None:
        """Nobody will know how it would have ended."""
        state = self._of(env)
        if state.trial == draw:
            state.trial = None

    def _of(self, env: str) -> _State:
        return self._states.setdefault(env, _State())
