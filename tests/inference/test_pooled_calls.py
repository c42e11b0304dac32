"""Retries over real sockets: engines that are full, fail, hang or require a key."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.inference.client import engine_client, pool
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.errors import (
    EngineBusy,
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    error_from_response,
)
from headrace.inference.schema import SCHEMA_HEADER, SamplingParams
from headrace.inference.server.http_server import bind, url_of
from headrace.inference.server.replies import error_reply
from headrace.inference.weights.reading import WeightsUnreachable
from headrace.rollout.version import Version
from headrace.transport.endpoint import Endpoint, write_endpoint
from tests.inference.engine_stand_in import EngineStandIn
from tests.inference.openai_stand_in import error

ONE = SamplingParams(max_tokens=1)


@contextlib.asynccontextmanager
async def client_of(engines: Any, **options: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(engines, **options)
    try:
        yield client
    finally:
        await client.close()


async def generate(client: EngineClient, times: int = 1, session: str | None = None) -> None:
    for _ in range(times):
        assert (await client.generate([1], ONE, session=session)).token_ids == [5]


async def test_an_engine_that_is_full_is_left_alone_for_as_long_as_it_wants_and_another_is_asked() -> None:
    async with EngineStandIn(lambda: error(429, "full", Retry_After="30")) as full, EngineStandIn() as free:
        async with client_of([full.url, free.url]) as client:
            await generate(client, times=6)
        assert (full.asked, free.asked) == (1, 6)


async def test_where_every_engine_is_full_the_request_waits() -> None:
    answers = [None, error(429, "full", Retry_After="0"), error(429, "full", Retry_After="0")]
    async with EngineStandIn(lambda: answers.pop()) as engine, client_of([engine.url]) as client:
        await generate(client)
        assert engine.asked == 3


async def test_engines_that_stay_full_are_named_at_the_end() -> None:
    full = EngineStandIn(lambda: error(429, "no room", Retry_After="30"))
    async with full, client_of([full.url], retry_for=0.1) as client:
        with pytest.raises(EngineBusy, match=f"no room.*429.*{full.url}"):
            await generate(client)
        assert full.asked == 1


async def test_an_engine_that_is_about_to_end_has_its_requests_made_elsewhere() -> None:
    async with EngineStandIn(lambda: error(503, "the engine is stopping")) as ending, EngineStandIn() as other:
        async with client_of([ending.url, other.url], retry_for=5.0) as client:
            await generate(client, times=8)
        assert (ending.asked, other.asked) == (pool.BREAKER_FAILURES, 8)


@pytest.mark.parametrize("status", [502, 504])
async def test_an_engine_that_restarts_behind_a_gateway_costs_time_and_nothing_else(status: int) -> None:
    def gateway() -> web.Response:
        return web.Response(text="<html>upstream</html>", status=status)

    answers = [None, gateway(), gateway()]
    async with EngineStandIn(lambda: answers.pop()) as engine, client_of([engine.url], retry_for=5.0) as client:
        await generate(client)
        assert engine.asked == 3
    async with EngineStandIn(gateway) as engine, client_of([engine.url], retry_for=0.1) as client:
        with pytest.raises(EngineUnavailable, match=f"upstream</html>.*{status}"):
            await generate(client)


def test_a_502_of_our_own_server_is_final_since_the_weights_would_not_come_again() -> None:
    ours = error_reply(WeightsUnreachable("the trainer is gone"))
    failure = error_from_response("http://engine", ours.status_code, dict(ours.headers), bytes(ours.body))
    assert isinstance(failure, EngineFailed) and "the trainer is gone" in str(failure)


async def test_a_connection_that_breaks_while_the_answer_is_awaited_costs_nothing() -> None:
    async with EngineStandIn() as dying, EngineStandIn() as other, client_of([dying.url, other.url]) as client:
        dying.hold = asyncio.Event()
        client.join("group")
        asking = asyncio.create_task(generate(client, session="group"))
        while not dying.asked:
            await asyncio.sleep(0.01)
        await dying._runner.cleanup()
        await asking
        assert other.asked == 1


async def test_a_refusal_is_final() -> None:
    async with EngineStandIn(lambda: error(400, "too long")) as engine, EngineStandIn() as other:
        async with client_of([engine.url, other.url]) as client:
            with pytest.raises(EngineRejected, match="too long"):
                await generate(client)
        assert other.asked == 0


async def test_a_failure_that_was_answered_is_final_and_soon_others_are_asked_instead() -> None:
    async with EngineStandIn(lambda: error(500, "out of order")) as sick, EngineStandIn() as well:
        async with client_of([sick.url, well.url]) as client:
            outcomes = await asyncio.gather(*[generate(client) for _ in range(40)], return_exceptions=True)
            await generate(client, times=6)
        failed = [outcome for outcome in outcomes if outcome is not None]
        assert all(isinstance(outcome, EngineFailed) for outcome in failed)
        assert len(failed) == sick.asked == 20  # half of those that were sent at once, and none later
        assert well.asked == 26


SAMPLED = {
    "token_ids": [5],
    "finish_reason": "stop",
    "logprobs": {"content": [{"logprob": -0.5}]},
    "weight_versions": [{"version": "0-0", "start": 0, "end": 1}],
}


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ([], "choices"),
        ([SAMPLED | {"weight_versions": [{"version": "new", "start": 0, "end": 1}]}], "'new'"),
        ([SAMPLED | {"weight_versions": [{"version": "0-0", "start": 3, "end": 1}]}], r"\[3, 1\)"),
        ([SAMPLED | {"weight_versions": None}], "weight_versions"),
        ([SAMPLED | {"token_ids": [5, 6]}], "token_ids"),
        ([SAMPLED | {"truncated_logprobs": [-0.1, -0.2]}], "logprobs"),
    ],
)
async def test_a_completion_that_does_not_fit_together_is_a_failure_of_its_engine(
    choices: list[Any], complaint: str
) -> None:
    engine = EngineStandIn(lambda: web.json_response({"choices": choices}))
    async with engine, client_of([engine.url]) as client:
        with pytest.raises(EngineFailed, match=f"{engine.url}/inference/v1/generate .*{complaint}"):
            await generate(client)


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ([None, {"9": {"logprob": -1.0}}], r"\b2\b.*\b1\b"),
        ([None, None], r"\b2\b.*\b1\b"),
        ([None], r"\b1\b.*\b2\b"),
    ],
)
async def test_scores_of_other_tokens_are_a_failure_of_the_engine(tables: list[Any], complaint: str) -> None:
    answer = {"request_id": "r", "choices": [{"index": 0, **SAMPLED, "logprobs": None}], "prompt_logprobs": tables}
    async with EngineStandIn(lambda: web.json_response(answer)) as engine, client_of([engine.url]) as client:
        with pytest.raises(EngineFailed, match=f"{engine.url}/inference/v1/generate .*{complaint}"):
            await client.score([1, 2])


@pytest.mark.parametrize("schema", ["abc", "2", "-1"])
async def test_an_answer_of_a_schema_that_is_not_known_is_a_failure_of_its_engine(schema: str) -> None:
    engine = EngineStandIn(lambda: web.json_response({}, headers={SCHEMA_HEADER: schema}))
    async with engine, client_of([engine.url]) as client:
        with pytest.raises(EngineFailed, match=f"{engine.url}.*{schema}"):
            await generate(client)


async def test_a_report_with_a_version_that_is_none_is_a_failure_of_its_engine_alone() -> None:
    async with EngineStandIn() as sick, EngineStandIn() as well, client_of([sick.url, well.url]) as client:
        sick.version = "main"
        with pytest.raises(EngineFailed, match=f"{sick.url}/health .*'main'"):
            await client.health()
        assert list(await client.health_by_url()) == [well.url]


async def test_a_single_failing_engine_fails_every_request() -> None:
    async with EngineStandIn(lambda: error(500, "out of order")) as sick, client_of([sick.url]) as client:
        for _ in range(6):
            with pytest.raises(EngineFailed, match="out of order"):
                await generate(client)
        assert sick.asked == 6


async def test_what_takes_too_long_is_asked_once_of_every_other_engine() -> None:
    async with EngineStandIn() as one, EngineStandIn() as two, EngineStandIn() as three:
        one.hold = two.hold = asyncio.Event()
        async with client_of([one.url, two.url, three.url], timeout=0.2) as client:
            await generate(client)
            assert [one.asked, two.asked, three.asked] == [1, 1, 1]
            three.hold = one.hold
            with pytest.raises(EngineTimeout) as late:
                await generate(client)
        assert all(engine.url in str(late.value) for engine in (one, two, three))
        assert [one.asked, two.asked, three.asked] == [2, 2, 2]


async def test_an_engine_that_was_given_up_is_tried_and_asked_again_once_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "MIN_OPEN_S", 0.05)
    monkeypatch.setattr(engine_client, "POLL_INTERVAL_S", 0.02)
    answers: list[web.Response | None] = [error(503, "starting") for _ in range(3)]
    async with EngineStandIn(lambda: answers.pop() if answers else None) as engine:
        async with client_of([engine.url], retry_for=30.0) as client:
            await generate(client)
        assert engine.asked == 4


async def test_few_attempts_are_made_while_no_engine_is_reachable() -> None:
    with bind("127.0.0.1", 0) as silent:  # bound, not listening: connections are refused
        async with client_of([url_of(silent)], retry_for=0.5) as client:
            tried = []
            request = client._http.request

            async def counting(*arguments: Any) -> Any:
                tried.append(arguments[2])
                return await request(*arguments)

            client._http.request = counting  # type: ignore[method-assign]
            outcomes = await asyncio.gather(*[generate(client) for _ in range(50)], return_exceptions=True)
            assert all(isinstance(outcome, EngineUnavailable) for outcome in outcomes)
            assert tried.count("/inference/v1/generate") == 50  # each once, and then not at all
            assert tried.count("/health") <= 2


async def test_the_last_error_names_every_engine() -> None:
    with bind("127.0.0.1", 0) as silent:
        async with EngineStandIn(lambda: error(503, "stopping")) as ending:
            async with client_of([url_of(silent), ending.url], retry_for=0.1) as client:
                with pytest.raises(EngineUnavailable) as failed:
                    await generate(client)
            assert url_of(silent) in str(failed.value)
            assert ending.url in str(failed.value) and "stopping" in str(failed.value)


async def test_each_route_gets_its_key() -> None:
    async with EngineStandIn() as engine, client_of([engine.url], api_key="door", admin_key="desk") as client:
        await generate(client)
        await client.pause()
        await client.update_weights(Path("weights"), Version(0, 1))
        await client.resume()
        await client.health()
    assert engine.keys == {
        "/inference/v1/generate": {"Bearer door"},
        "/health": {"Bearer door"},
        "/pause": {"Bearer desk"},
        "/update_weights": {"Bearer desk"},
        "/resume": {"Bearer desk"},
    }


async def test_requests_of_a_session_say_so_to_the_engine() -> None:
    async with EngineStandIn() as engine, client_of([engine.url]) as client:
        for session in ("größe-1", "größe-1", "other", None):
            if session is not None:
                client.join(session)
            await generate(client, session=session)
    first, second, other, alone = engine.sessions
    assert first == second != other
    assert first is not None and first.isascii()
    assert alone is None


async def test_the_keys_of_a_run_are_in_its_endpoints(tmp_path: Path) -> None:
    async with EngineStandIn() as engine, EngineStandIn() as open_to_all, client_of(tmp_path) as client:
        write_endpoint(tmp_path / "inference.json", Endpoint(engine.url, 1, "door", "desk"))
        write_endpoint(tmp_path / "inference-1.json", Endpoint(open_to_all.url, 2))
        await generate(client, times=2)
        await client.pause()
    assert engine.keys["/inference/v1/generate"] == {"Bearer door"}
    assert engine.keys["/pause"] == {"Bearer desk"}
    assert open_to_all.keys["/inference/v1/generate"] == open_to_all.keys["/pause"] == {None}


async def test_a_server_that_came_back_with_another_key_is_asked_with_that(tmp_path: Path) -> None:
    key = "old"

    async with EngineStandIn() as engine, client_of(tmp_path) as client:

        def check() -> web.Response | None:
            return None if f"Bearer {key}" in engine.keys["/inference/v1/generate"] else error(401, "wrong key")

        engine.respond = check
        write_endpoint(tmp_path / "inference.json", Endpoint(engine.url, 1, key))
        await generate(client)
        await asyncio.sleep(2 * engine_client.ENDPOINTS_MAX_AGE_S)
        key = "new"
        write_endpoint(tmp_path / "inference.json", Endpoint(engine.url, 2, key))
        await generate(client)
        key = "another"
        with pytest.raises(EngineRejected, match=r"wrong key.*401.*api_key_var") as refused:
            await generate(client)
        assert "new" not in str(refused.value)


async def test_a_replica_that_joins_is_found_without_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "POLL_INTERVAL_S", 0.0)
    async with EngineStandIn() as first, EngineStandIn() as second, client_of(tmp_path) as client:
        write_endpoint(tmp_path / "inference.json", Endpoint(first.url, 1))
        await generate(client)
        write_endpoint(tmp_path / "inference-1.json", Endpoint(second.url, 2))
        await asyncio.sleep(2 * engine_client.ENDPOINTS_MAX_AGE_S)
        await generate(client, times=3)
        assert second.asked
        (tmp_path / "inference.json").unlink()
        await asyncio.sleep(2 * engine_client.ENDPOINTS_MAX_AGE_S)
        asked = first.asked
        await generate(client, times=3)
        assert first.asked == asked


async def test_reports_tell_how_much_an_engine_can_run() -> None:
    small, large = EngineStandIn(capacity=2), EngineStandIn(capacity=6)
    async with small, large, client_of(lambda: [small.url, large.url]) as client:
        await client.health_by_url()
        hold = small.hold = large.hold = asyncio.Event()
        asking = [asyncio.create_task(generate(client)) for _ in range(8)]
        while small.asked + large.asked < 8:
            await asyncio.sleep(0.01)
        assert (small.asked, large.asked) == (2, 6)
        hold.set()
        await asyncio.gather(*asking)


@pytest.mark.parametrize("withdrawn", [False, True])
async def test_requests_on_an_engine_that_was_lost_with_its_host_are_made_elsewhere(
    withdrawn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "HEALTH_TIMEOUT_S", 0.05)

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        writer.close()

    silent = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    write_endpoint(tmp_path / "a.json", Endpoint(f"http://127.0.0.1:{port}", pid=1))
    async with EngineStandIn() as engine, client_of(tmp_path) as client:
        call = asyncio.create_task(generate(client))
        await asyncio.sleep(0.05)
        write_endpoint(tmp_path / "b.json", Endpoint(engine.url, pid=2))
        if withdrawn:
            (tmp_path / "a.json").unlink()
        for _ in range(1 if withdrawn else pool.BREAKER_FAILURES):
            assert not call.done()
            await client.health_by_url()
        await call
        assert engine.asked == 1
    silent.close()
