"""Which engine is asked, in simulated time: load, sessions, breakers, engines that come and go."""

import pytest

from headrace.inference.client.errors import EngineBusy, EngineCallError, EngineFailed, EngineTimeout, EngineUnavailable
from headrace.inference.client.pool import MAX_OPEN_S, MIN_OPEN_S, CircuitBreaker, EnginePool, PooledEngine, RetryState
from headrace.inference.schema import Health
from headrace.transport.endpoint import Endpoint


def make_pool(*urls: str) -> EnginePool:
    pool = EnginePool()
    pool.update(Endpoint(url, 1) for url in urls)
    return pool


def health(capacity: int = 8, running: int = 0, waiting: int = 0) -> Health:
    return Health("ok", "0-0", "tiny", running, waiting, False, capacity, 64, 300)


def ask(pool: EnginePool, session: str | None = None, now: float = 0.0, avoid: set[str] | None = None) -> str:
    """Choose, and leave the request in flight."""
    engine = pool.choose(session, now, avoid or set())
    assert engine is not None
    engine.in_flight += 1
    return engine.url


def put_in_flight(pool: EnginePool, url: str, requests: int) -> None:
    pool.engines[url].in_flight = requests


# -- load -------------------------------------------------------------------------------------------------------------


def test_equals_are_asked_in_turn():
    pool = make_pool("a", "b", "c")
    seen = [pool.choose(None, 0.0) for _ in range(6)]
    assert [engine.url for engine in seen if engine] == ["a", "b", "c", "a", "b", "c"]


def test_the_least_busy_is_asked_by_what_is_in_flight_here():
    pool = make_pool("a", "b")
    put_in_flight(pool, "a", 3)
    assert [ask(pool) for _ in range(4)] == ["b", "b", "b", "a"]


def test_an_engine_that_runs_four_times_as_much_gets_four_times_as_many():
    pool = make_pool("small", "large")
    pool.record_health(pool.engines["small"], health(capacity=4))
    pool.record_health(pool.engines["large"], health(capacity=16))
    asked = [ask(pool) for _ in range(20)]
    assert (asked.count("small"), asked.count("large")) == (4, 16)


def test_what_others_have_there_counts_and_our_own_counts_once():
    pool = make_pool("a", "b")
    put_in_flight(pool, "a", 2)
    pool.record_health(pool.engines["a"], health(running=5, waiting=1))  # two of these six are ours
    pool.record_health(pool.engines["b"], health())
    assert pool.engines["a"].foreign_requests == 4
    assert [ask(pool) for _ in range(6)] == ["b"] * 6
    assert pool.engines["a"].load() == pool.engines["b"].load() == 6 / 8


def test_an_engine_that_has_said_nothing_yet_is_taken_to_be_as_large_as_the_largest():
    pool = make_pool("known", "new")
    pool.record_health(pool.engines["known"], health(capacity=8))
    assert [ask(pool) for _ in range(4)].count("new") == 2


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_stays_and_another_goes_where_there_are_fewer_conversations():
    pool = make_pool("a", "b")
    for _ in range(3):
        pool.join("group")
    pool.join("another")
    chosen = [pool.choose(session, 0.0) for session in ("group", "another", "group", "another", "group")]
    assert [engine.url for engine in chosen if engine] == ["a", "b", "a", "b", "a"]
    pool.join("third")
    third = pool.choose("third", 0.0)
    assert third is not None and third.url == "b"  # one conversation there, three on the other


def test_conversations_that_end_make_room():
    pool = make_pool("a", "b")
    for session in ("one", "two", "two"):
        pool.join(session)
    assert [ask(pool, session) for session in ("one", "two")] == ["a", "b"]
    for engine in pool.engines.values():
        engine.in_flight = 0
    pool.leave("one")
    assert [engine.conversations for engine in pool.engines.values()] == [0, 2]
    pool.leave("two")
    pool.leave("two")
    assert [engine.conversations for engine in pool.engines.values()] == [0, 0]


def test_a_session_leaves_an_engine_that_fails_and_stays_where_it_went():
    pool = make_pool("a", "b")
    pool.join("group")
    assert ask(pool, "group") == "a"
    fail(pool, "a", times=3)
    assert ask(pool, "group") == "b"
    pool.record_success(pool.engines["a"])
    assert ask(pool, "group") == "b"
    assert [engine.conversations for engine in pool.engines.values()] == [0, 1]


@pytest.mark.parametrize(
    ("here", "there", "moves"),
    [
        (8, 0, False),  # all of it runs: there is no line
        (16, 9, False),  # a line, but not twice as long as the other's
        (16, 7, True),
        (40, 18, True),
    ],
)
def test_a_session_leaves_a_long_line_for_a_much_shorter_one(here: int, there: int, moves: bool):
    pool = make_pool("a", "b")
    pool.join("group")
    assert ask(pool, "group") == "a"
    pool.engines["a"].in_flight = 0
    pool.record_health(pool.engines["a"], health(running=min(here, 8), waiting=max(here - 8, 0)))
    pool.record_health(pool.engines["b"], health(running=min(there, 8), waiting=max(there - 8, 0)))
    pool.engines["a"].conversations = 0  # the engine's report has it already
    engine = pool.choose("group", 0.0)
    assert engine is not None and (engine.url == "b") is moves


# -- who is not asked -------------------------------------------------------------------------------------------------


def fail(pool: EnginePool, url: str, times: int = 1, now: float = 0.0) -> None:
    for _ in range(times):
        pool.record_error(pool.engines[url], EngineUnavailable(f"{url} cannot be reached"), now)


def test_an_engine_that_keeps_failing_is_not_asked_until_a_trial_went_well():
    pool = make_pool("a", "b")
    fail(pool, "a", times=2)
    pool.record_success(pool.engines["a"])  # not in a row
    fail(pool, "a", times=2)
    assert {ask(pool), ask(pool)} == {"a", "b"}
    fail(pool, "a")
    assert {ask(pool, now=100.0) for _ in range(4)} == {"b"}
    breaker = pool.engines["a"].breaker
    assert [breaker.is_due(now) for now in (MIN_OPEN_S - 0.1, MIN_OPEN_S)] == [False, True]
    breaker.begin_trial(MIN_OPEN_S)
    pool.record_health(pool.engines["a"], health())
    put_in_flight(pool, "a", 0)
    assert ask(pool) == "a"


def test_a_health_reply_without_a_trial_does_not_close_the_breaker():
    pool = make_pool("a")
    fail(pool, "a", times=3)
    pool.record_health(pool.engines["a"], health())
    assert pool.choose(None, 0.5) is None


def test_open_times_double_up_to_a_limit_and_reset_after_a_success():
    breaker, now, rests = CircuitBreaker(), 0.0, []
    for _ in range(3):
        breaker.fail(now)
    for _ in range(6):
        rest = next(step for step in range(1, 200) if breaker.is_due(now + step / 4)) / 4
        rests.append(rest)
        now += rest
        breaker.begin_trial(now)  # and nothing comes of it
        assert not breaker.is_closed
    assert rests == [1, 2, 4, 8, MAX_OPEN_S, MAX_OPEN_S]
    now += MAX_OPEN_S
    breaker.begin_trial(now)
    breaker.pass_trial()
    assert breaker.is_closed
    breaker.fail(now)  # on probation, one is enough
    assert not breaker.is_closed
    breaker.succeed()
    for _ in range(3):
        assert breaker.is_closed
        breaker.fail(now)
    assert breaker.is_due(now + MIN_OPEN_S)


def test_what_comes_in_late_does_not_prolong_a_rest():
    breaker = CircuitBreaker()
    for number in range(100):  # all that were in flight when it died
        breaker.fail(number / 100)
    assert breaker.is_due(0.02 + MIN_OPEN_S)


def test_failures_that_an_engine_reports_itself_count_only_while_another_can_be_asked():
    pool = make_pool("a", "b")
    for url in ("a", "b"):
        for _ in range(5):
            pool.record_error(pool.engines[url], EngineFailed("not finite"), 0.0)
    assert [engine.breaker.is_closed for engine in pool.engines.values()] == [False, True]


def test_an_engine_that_asked_for_a_pause_gets_it_and_keeps_its_standing():
    pool = make_pool("a", "b")
    for _ in range(5):
        pool.record_error(pool.engines["a"], EngineBusy("the queue is full", 7.0), 0.0)
    assert {ask(pool, now=6.9) for _ in range(3)} == {"b"}
    assert ask(pool, now=7.0) == "a"
    pool.record_error(pool.engines["b"], EngineBusy("the queue is full", 20.0), 0.0)
    assert pool.choose(None, 6.0) is None


# -- coming and going -------------------------------------------------------------------------------------------------


def test_an_engine_that_vanished_ends_what_it_has_begun_and_gets_no_more():
    pool = make_pool("a", "b")
    pool.join("group")
    assert ask(pool, "group") == "a"
    leaving = pool.engines["a"]
    pool.update([Endpoint("b", 1)])
    assert {ask(pool, "group"), ask(pool)} == {"b"}
    leaving.in_flight -= 1
    pool.record_success(leaving)
    assert (leaving.in_flight, list(pool.engines)) == (0, ["b"])


def test_a_new_engine_is_asked_and_those_that_stay_keep_their_counts():
    pool = make_pool("a")
    for _ in range(3):
        ask(pool)
    pool.update([Endpoint("a", 1), Endpoint("b", 1)])
    assert [ask(pool) for _ in range(3)] == ["b", "b", "b"]


@pytest.mark.parametrize("successor", [Endpoint("a", 2), Endpoint("a", 1, api_key="new")])
def test_a_new_process_at_an_old_url_starts_fresh(successor: Endpoint):
    pool = make_pool("a")
    fail(pool, "a", times=3)
    assert pool.choose(None, 0.0) is None
    pool.update([successor])
    assert ask(pool) == "a"


def test_keys_are_in_no_message():
    assert "secret" not in repr(PooledEngine(Endpoint("a", 1, "secret", "more secret")))


# -- what is tried again ----------------------------------------------------------------------------------------------


def no_answer(retries: RetryState, engine: PooledEngine, error: EngineCallError, now: float = 0.0) -> None:
    retries.fail(engine, error, now)


def test_failed_engines_are_retried_after_growing_delays():
    pool, retries = make_pool("a", "b"), RetryState(60.0)
    engines = pool.engines.values()
    pauses, now = [], 0.0
    for _ in range(8):
        for engine in engines:
            no_answer(retries, engine, EngineUnavailable("down"), now)
        assert retries.avoided == {"a", "b"}
        pauses.append(retries.next_delay(engines, now))
        assert retries.avoided == set()
        now += pauses[-1]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_the_time_for_trying_counts_from_the_first_failure():
    pool, retries = make_pool("a"), RetryState(10.0)
    (engine,) = pool.engines.values()
    no_answer(retries, engine, EngineUnavailable("broke off"), now=500.0)  # after a long answer that did not come
    assert retries.next_delay([engine], 500.0) == 0.05
    assert retries.next_delay([engine], 509.0) == 0.1
    with pytest.raises(EngineUnavailable, match=r"broke off.*10 s"):
        retries.next_delay([engine], 509.9)


def test_an_engine_that_was_too_slow_is_not_asked_again():
    pool, retries = make_pool("a", "b"), RetryState(60.0)
    slow, other = pool.engines.values()
    no_answer(retries, slow, EngineTimeout("took too long"))
    no_answer(retries, other, EngineUnavailable("down"))
    retries.next_delay(pool.engines.values(), 0.0)
    assert retries.avoided == {"a"}
    no_answer(retries, other, EngineTimeout("took too long as well"))
    with pytest.raises(EngineTimeout, match="took too long; took too long as well"):
        retries.next_delay(pool.engines.values(), 1.0)


def test_the_last_error_names_every_engine_and_why_it_was_not_asked():
    pool, retries = make_pool("a", "b", "c"), RetryState(0.0)
    fail(pool, "a", times=3)
    pool.record_error(pool.engines["b"], EngineBusy("b has no room", 9.0), 0.0)
    no_answer(retries, pool.engines["c"], EngineBusy("c has no room"))
    with pytest.raises(EngineBusy, match=r"^a .*; b has no room; c has no room"):
        retries.next_delay(pool.engines.values(), 0.0)


def test_a_pool_without_engines_gives_up_as_unavailable():
    with pytest.raises(
        EngineUnavailable,
    ):
        RetryState(0.0).next_delay([], 0.0)
