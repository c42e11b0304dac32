"""Which engine is asked: who there is, how busy each of them is, and who is in no state to be asked.

A session (a group's conversations, and all turns of each) stays with the engine that has its prompt in its cache,
unless that is gone, does not answer, or has far more to do than another. Everybody else goes to the least busy, by what
is in flight here and what it says that others have there, relative to what it can run at once; in turn among equals.

No socket and no clock: the caller asks, passes the time in, and tells what came of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from headrace.inference.client.breaker import Breaker
from headrace.inference.schema import Health
from headrace.transport.endpoint import Endpoint

OVERLOAD = 2.0
"""How many times as busy as the least busy one an engine with a line must be, for a session to leave it."""


class PooledEngine:
    """One engine as this process sees it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.url = endpoint.url
        self.headers = _bearer(endpoint.api_key)
        self.admin_headers = _bearer(endpoint.admin_key)
        self.breaker = Breaker()
        self.trouble = ""
        """Why it is not asked, if it is not."""
        self.in_flight = 0
        """Requests of this process."""
        self.conversations = 0
        """Of the sessions that are here: those that wait between two requests will be back."""
        self.busy_until = 0.0
        """It has asked to be left alone until then."""
        self.capacity: int | None = None
        """Requests that it runs at once, once it has said so."""
        self.of_others = 0
        """Requests of other processes, by its last report."""
        self.last_choice = 0

    def load(self, unknown_capacity: int = 1) -> float:
        """Above 1, requests wait in its line."""
        own = max(self.in_flight, self.conversations)
        return (own + self.of_others) / (self.capacity or unknown_capacity)


class _Session(msgspec.Struct):
    members: int = 0
    engine: PooledEngine | None = None


class Pool:
    """`engines` are those that may be asked, by address. One that vanishes from there ends what it has begun."""

    def __init__(self) -> None:
        self.engines: dict[str, PooledEngine] = {}
        self._sessions: dict[str, _Session] = {}
        self._choices = 0

    def update(self, endpoints: Iterable[Endpoint]) -> None:
        """Who there is now. A process that took the place of another at its address begins anew."""
        known = self.engines
        self.engines = {}
        for endpoint in endpoints:
            engine = known.get(endpoint.url)
            self.engines[endpoint.url] = (
                engine if engine is not None and engine.endpoint == endpoint else PooledEngine(endpoint)
            )

    def join(self, session: str) -> None:
        """One more conversation of a session begins."""
        known = self._sessions.setdefault(session, _Session())
        known.members += 1
        if known.engine is not None:
            known.engine.conversations += 1

    def leave(self, session: str) -> None:
        known = self._sessions[session]
        known.members -= 1
        if known.engine is not None:
            known.engine.conversations -= 1
        if not known.members:
            del self._sessions[session]

    def choose(self, session: str | None, now: float, avoid: Collection[str] = ()) -> PooledEngine | None:
        """Whom to ask; None if there is nobody at the moment."""
        known = self._sessions.get(session) if session is not None else None
        able = [
            engine
            for engine in self.engines.values()
            if engine.breaker.is_closed and engine.busy_until <= now and engine.url not in avoid
        ]
        if not able:
            return None
        if known is not None and known.engine in able and not _is_overloaded(known.engine, able):
            return known.engine
        engine = self._least_busy(able)
        if known is not None:
            _move(known, engine)
        return engine

    def _least_busy(self, able: list[PooledEngine]) -> PooledEngine:
        # One that has said nothing yet is taken to be as large as the largest.
        unknown = max((engine.capacity or 1 for engine in able), default=1)
        engine = min(able, key=lambda engine: (engine.load(unknown), engine.last_choice))
        self._choices += 1
        engine.last_choice = self._choices
        return engine

    def answered(self, engine: PooledEngine) -> None:
        engine.breaker.succeed()
        engine.trouble = ""

    def unreachable(self, engine: PooledEngine, why: str, now: float) -> None:
        """No answer came, or one that says that it serves nobody."""
        engine.trouble = why
        engine.breaker.fail(now)

    def failed(self, engine: PooledEngine, why: str, now: float) -> None:
        """It answered that it failed. Perhaps all do, having the same weights: it counts if another can be asked."""
        if any(other.breaker.is_closed for other in self.engines.values() if other is not engine):
            self.unreachable(engine, why, now)

    def busy(self, engine: PooledEngine, why: str, until: float) -> None:
        """It has asked for a pause: that is no failure."""
        engine.trouble = why
        engine.busy_until = max(engine.busy_until, until)
        engine.breaker.succeed()

    def to_be_heard(self, now: float) -> list[PooledEngine]:
        """Whom to ask for a report: those whom anybody asks, and those whose time for a trial has come."""
        return [engine for engine in self.engines.values() if engine.breaker.is_closed or engine.breaker.is_due(now)]

    def report(self, engine: PooledEngine, health: Health) -> None:
        engine.capacity = health.capacity
        engine.of_others = max(0, health.running + health.waiting - engine.in_flight)
        engine.breaker.pass_trial()


def _is_overloaded(engine: PooledEngine, able: list[PooledEngine]) -> bool:
    if engine.capacity is None or (load := engine.load()) <= 1:
        return False
    return any(other.capacity is not None and load > OVERLOAD * other.load() for other in able)


def _move(session: _Session, engine: PooledEngine) -> None:
    if session.engine is not None:
        session.engine.conversations -= session.members
    engine.conversations += session.members
    session.engine = engine


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}
