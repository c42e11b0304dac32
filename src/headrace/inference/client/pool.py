"""Engine selection: load balancing, session affinity, circuit breakers and retries. No sockets and no clock.

A session (the conversations of a group, with all their turns) stays on the engine that has its prompt cached, unless
that engine is gone, failing, or much busier than another. Other requests go to the least loaded engine: requests in
flight here plus those of other processes, divided by the engine's capacity; ties in rotation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from headrace.inference.client.errors import EngineBusy, EngineCallError, EngineFailed, EngineTimeout, EngineUnavailable
from headrace.inference.schema import Health
from headrace.transport.endpoint import Endpoint

OVERLOAD_FACTOR = 2.0
"""A session leaves an engine with a queue whose load is more than this many times another's."""
BREAKER_FAILURES = 3
"""Consecutive failures that open a breaker."""
MIN_OPEN_S, MAX_OPEN_S = 1.0, 10.0
"""How long a breaker stays open, the first time and at most."""
MIN_RETRY_S, MAX_RETRY_S = 0.05, 2.0
"""Delay before a retry, the first and the longest."""
NO_ENDPOINTS = "no inference server has published its address yet"


class CircuitBreaker:
    """Stops requests to an engine that keeps failing.

    Closed, it allows all requests. It opens after consecutive failures, for a time that doubles with each opening. Then
    it is half open: one trial is made, and a success closes it on probation, where the next failure opens it again.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._openings = 0
        """Since the last success."""
        self._open_until: float | None = None
        self._on_trial = False

    @property
    def is_closed(self) -> bool:
        return self._open_until is None

    def fail(self, now: float) -> None:
        """Count a failure; one that arrives while the breaker is open changes nothing else."""
        self._failures += 1
        if self.is_closed and self._failures >= BREAKER_FAILURES:
            self._open(now)

    def succeed(self) -> None:
        self._failures = self._openings = 0
        self._open_until, self._on_trial = None, False

    def is_due(self, now: float) -> bool:
        """Whether it is time for a trial."""
        return self._open_until is not None and now >= self._open_until

    def begin_trial(self, now: float) -> None:
        """Begin a trial if one is due. The breaker stays open, for longer than before, until the trial passes."""
        if self.is_due(now):
            self._open(now)
            self._on_trial = True

    def pass_trial(self) -> None:
        """Close the breaker on probation, if a trial is in progress."""
        if self._on_trial:
            self._open_until = None
            self._failures = BREAKER_FAILURES - 1
            self._on_trial = False

    def _open(self, now: float) -> None:
        self._open_until = now + min(MIN_OPEN_S * 2**self._openings, MAX_OPEN_S)
        self._openings += 1


@dataclass(eq=False)
class PooledEngine:
    """One engine as this process sees it."""

    endpoint: Endpoint
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    problem: str = ""
    """Why it is not available, if it is not."""
    in_flight: int = 0
    """Requests of this process."""
    conversations: int = 0
    """Conversations of the sessions on this engine, those between two requests included."""
    busy_until: float = 0.0
    """The time until which no requests are sent to it."""
    capacity: int | None = None
    """Requests that it runs at once; None until its first report."""
    foreign_requests: int = 0
    """Requests of other processes, by its last report."""
    last_choice: int = 0

    @property
    def url(self) -> str:
        return self.endpoint.url

    def load(self, unknown_capacity: int = 1) -> float:
        """Return requests per unit of capacity; above 1, requests are queued."""
        own = max(self.in_flight, self.conversations)
        return (own + self.foreign_requests) / (self.capacity or unknown_capacity)

    @property
    def has_queue(self) -> bool:
        return self.capacity is not None and self.load() > 1


class _Session(msgspec.Struct):
    members: int = 0
    engine: PooledEngine | None = None


class EnginePool:
    """The engines of a run, by URL. An engine that is removed still finishes the requests that it has."""

    def __init__(self) -> None:
        self.engines: dict[str, PooledEngine] = {}
        self._sessions: dict[str, _Session] = {}
        self._choices = 0

    def update(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the set of engines. A new process at an old URL starts with a fresh state."""
        registered = {engine.endpoint: engine for engine in self.engines.values()}
        self.engines = {endpoint.url: registered.get(endpoint) or PooledEngine(endpoint) for endpoint in endpoints}

    def join(self, key: str) -> None:
        """Add a conversation to a session."""
        session = self._sessions.setdefault(key, _Session())
        session.members += 1
        if session.engine is not None:
            session.engine.conversations += 1

    def leave(self, key: str) -> None:
        session = self._sessions[key]
        session.members -= 1
        if session.engine is not None:
            session.engine.conversations -= 1
        if not session.members:
            del self._sessions[key]

    def choose(self, key: str | None, now: float, avoid: Collection[str] = ()) -> PooledEngine | None:
        """Return the engine for a request of session `key`; None if no engine is available."""
        session = self._sessions.get(key) if key is not None else None
        current = None if session is None else session.engine
        if current is not None and self._is_available(current, now, avoid) and not current.has_queue:
            return current  # without a look at the others, of which there may be hundreds
        available = [engine for engine in self.engines.values() if self._is_available(engine, now, avoid)]
        if not available:
            return None
        if current in available:
            others = (other.load() for other in available if other.capacity is not None)
            if not current.has_queue or all(current.load() <= OVERLOAD_FACTOR * load for load in others):
                return current
        # An engine without a report counts as large as the largest.
        unknown = max(engine.capacity or 1 for engine in available)
        engine = min(available, key=lambda engine: (engine.load(unknown), engine.last_choice))
        self._choices += 1
        engine.last_choice = self._choices
        if session is not None:
            if session.engine is not None:
                session.engine.conversations -= session.members
            engine.conversations += session.members
            session.engine = engine
        return engine

    def _is_available(self, engine: PooledEngine, now: float, avoid: Collection[str]) -> bool:
        return (
            engine.breaker.is_closed
            and engine.busy_until <= now
            and engine.url not in avoid
            and self.engines.get(engine.url) is engine
        )

    def is_lost(self, engine: PooledEngine) -> bool:
        """Return whether requests in flight on an engine that does not answer a health check are better made elsewhere.

        That is so if its address was withdrawn, or if it has failed repeatedly and another engine is available.
        """
        if self.engines.get(engine.url) is not engine:
            return True
        return not engine.breaker.is_closed and any(other.breaker.is_closed for other in self.engines.values())

    def record_success(self, engine: PooledEngine) -> None:
        engine.breaker.succeed()
        engine.problem = ""

    def record_error(self, engine: PooledEngine, error: EngineCallError, now: float) -> None:
        """Count a call that failed. A full queue is not a failure: no requests are sent for a while.

        An error response counts if another engine is available: the weights, which all share, may be the cause.
        """
        others = (other for other in self.engines.values() if other is not engine)
        if isinstance(error, EngineFailed) and not any(other.breaker.is_closed for other in others):
            return
        engine.problem = str(error)
        if isinstance(error, EngineBusy):
            engine.busy_until = max(engine.busy_until, now + error.pause)
            engine.breaker.succeed()
        else:
            engine.breaker.fail(now)

    def record_health(self, engine: PooledEngine, health: Health) -> None:
        engine.capacity = health.capacity
        engine.foreign_requests = max(0, health.running + health.waiting - engine.in_flight)
        engine.breaker.pass_trial()


class RetryState:
    """The attempts of one request; it is retried until `seconds` after the first failure."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline: float | None = None
        self._delay = MIN_RETRY_S
        self._failures: dict[str, EngineCallError] = {}
        """The last failure of each engine, in order of time."""
        self.avoided: set[str] = set()
        """URLs that failed since the last delay, or timed out."""

    def fail(self, engine: PooledEngine, error: EngineCallError, now: float) -> None:
        """Record the failure of an attempt; its engine is avoided until the next delay."""
        self._set_deadline(now)
        self._failures.pop(engine.url, None)
        self._failures[engine.url] = error
        self.avoided.add(engine.url)

    def next_delay(self, engines: Collection[PooledEngine], now: float) -> float:
        """Return the seconds to wait before all engines but those that timed out may be tried again.

        Raises the last error, with the problem of every engine in its message, when it is time to give up.
        """
        deadline = self._set_deadline(now)
        slow = {url for url, error in self._failures.items() if isinstance(error, EngineTimeout)}
        all_slow = bool(slow) and slow >= {engine.url for engine in engines}
        if all_slow or now + self._delay > deadline:
            problems = {engine.url: engine.problem for engine in engines if engine.problem}
            problems |= {url: str(error) for url, error in self._failures.items()}
            last = next(reversed(self._failures.values()), EngineUnavailable())
            tried_for = "" if all_slow else f" (tried for {self._seconds:g} s)"
            raise type(last)(("; ".join(problems.values()) or NO_ENDPOINTS) + tried_for)
        self.avoided = slow
        delay, self._delay = self._delay, min(2 * self._delay, MAX_RETRY_S)
        return delay

    def _set_deadline(self, now: float) -> float:
        """Return the end of all retries, which follows from the time of the first call."""
        if self._deadline is None:
            self._deadline = now + self._seconds
        return self._deadline
