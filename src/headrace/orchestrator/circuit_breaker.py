"""Circuit breaker per environment: stop drawing from an environment whose episodes only fail.

After `MAX_FAILED_EPISODES` failed episodes in a row an environment is paused: its draws go to the other environments.
Then one trial draw tests it; while trials fail, the pauses double. Everything is counted in draws, not in seconds, so
the state is a function of the draws' outcomes and a resumed run restores it. If all environments are paused, all are
drawn; ending a run because of failures is decided elsewhere (`empty_batches`).
"""

from __future__ import annotations

import msgspec

MAX_FAILED_EPISODES = 16
FIRST_PAUSE_DRAWS = 16
MAX_PAUSE_DRAWS = 1024


class _State(msgspec.Struct):
    failed: int = 0
    """Failed episodes since the last success."""
    pause: int = 0
    """Length of the current pause in draws; 0: not paused."""
    until: int = 0
    """First draw after the pause."""
    trial: int | None = None
    """Draw that tests the environment again."""
    succeeded: int = -1
    """Newest draw with a success."""


class EnvironmentBreaker:
    """Breaker states by environment. Outcomes may be recorded in any order."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def is_paused(self, env: str, draw: int) -> bool:
        """Return whether draw number `draw` must go to another environment."""
        state = self._state(env)
        return bool(state.pause) and (draw < state.until or state.trial is not None)

    def record_draw(self, env: str, draw: int) -> None:
        state = self._state(env)
        if state.pause and draw >= state.until and state.trial is None:
            state.trial = draw

    def record_success(self, env: str, draw: int) -> bool:
        """Record that an episode of `draw` succeeded; return whether that ended a pause."""
        state = self._state(env)
        if state.failed:
            self._states[env] = _State()
        self._states[env].succeeded = max(draw, state.succeeded)
        return state.pause > 0

    def record_failure(self, env: str, draw: int, episodes: int) -> int:
        """Record that all `episodes` of `draw` failed; return the length of the pause that begins, 0 for none."""
        state = self._state(env)
        self.record_cancelled(env, draw)
        if draw < state.succeeded:
            return 0
        state.failed += episodes
        if state.failed < MAX_FAILED_EPISODES or draw < state.until:
            return 0
        state.pause = min(2 * state.pause, MAX_PAUSE_DRAWS) if state.pause else FIRST_PAUSE_DRAWS
        state.until = draw + 1 + state.pause
        return state.pause

    def record_cancelled(self, env: str, draw: int) -> None:
        """Record that `draw` ended without success or failure, so that it no longer counts as the trial."""
        state = self._state(env)
        if state.trial == draw:
            state.trial = None

    def _state(self, env: str) -> _State:
        return self._states.setdefault(env, _State())
