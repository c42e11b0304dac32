"""What has been tried for one request, and whether and when to try on. The time is passed in."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from headrace.inference.client.errors import EngineCallError, EngineTimeout, EngineUnavailable
from headrace.inference.client.pool import PooledEngine

FIRST_RETRY = 0.05
LONGEST_RETRY = 2.0
"""Seconds before an engine is asked again, the first time and after many."""
NOBODY = "no engine has said where it listens yet"


class Tries:
    """For `seconds` after the first failure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline: float | None = None
        self._delay = FIRST_RETRY
        self._failures: dict[str, EngineCallError] = {}
        """The last one of each engine, in the order in which they came."""
        self.avoided: set[str] = set()
        """Whoever has been asked in vain since the last pause, or was too slow."""

    def fail(self, engine: PooledEngine, error: EngineCallError, now: float) -> None:
        self._begin(now)
        self._failures.pop(engine.url, None)
        self._failures[engine.url] = error
        self.avoided.add(engine.url)

    def pause(self, engines: Collection[PooledEngine], now: float) -> float:
        """Seconds to wait, after which everybody may be asked again but those who were too slow.

        Raises when it is time to give up; the error names every engine, and why it did not answer.
        """
        deadline = self._begin(now)
        slow = {url for url, error in self._failures.items() if isinstance(error, EngineTimeout)}
        everybody_was_slow = bool(slow) and slow >= {engine.url for engine in engines}
        if everybody_was_slow or now + self._delay > deadline:
            raise self._summary(engines, "" if everybody_was_slow else f" (tried for {self._seconds:g} s)")
        self.avoided = slow
        delay, self._delay = self._delay, min(2 * self._delay, LONGEST_RETRY)
        return delay

    def _begin(self, now: float) -> float:
        """The time at which to give up."""
        if self._deadline is None:
            self._deadline = now + self._seconds
        return self._deadline

    def _summary(self, engines: Iterable[PooledEngine], how_long: str) -> EngineCallError:
        """The last failure, in the words of all."""
        words = {engine.url: engine.trouble for engine in engines if engine.trouble}
        words |= {url: str(error) for url, error in self._failures.items()}
        last = next(reversed(self._failures.values()), EngineUnavailable())
        return type(last)(("; ".join(words.values()) or NOBODY) + how_long)
