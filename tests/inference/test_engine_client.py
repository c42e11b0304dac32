"""The client with several engines, engines that come and go, and engines that do not answer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.client import pool
from headrace.inference.client.engine_client import READY_POLL_S, EngineClient
from headrace.inference.client.errors import (
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    server_message,
)
from headrace.inference.schema import Completion, SamplingParams, WeightVersionSpan
from headrace.inference.server.app import App
from headrace.inference.server.http_server import CannotListen, HttpServer, bind, url_of
from headrace.rollout.version import Version
from headrace.transport.endpoint import Endpoint, write_endpoint
from headrace.transport.weights import read_marker
from tests.inference.engine_stand_in import EngineStandIn
from tests.inference.serving import ADMIN_KEY, backend_of, chat_of, served

ONE = SamplingParams(max_tokens=1)
Serve = Callable[[], contextlib.AbstractAsyncContextManager[str]]


@pytest.fixture
def serve(model_directory: Path, make_model: Callable[[int], Any]) -> Serve:
    """An engine with its server in this process; gives its URL."""
    chat = chat_of(model_directory)

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[str]:
        async with served(await backend_of(make_model(0), model_directory, max_model_len=64), chat) as url:
            yield url

    return serve


@contextlib.asynccontextmanager
async def client_of(engines: Any, **options: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(engines, admin_key=ADMIN_KEY, **options)
    try:
        yield client
    finally:
        await client.close()


def note_requests(client: EngineClient) -> list[str]:
    """Record the URLs of all requests from now on but health checks."""
    asked: list[str] = []
    request = client._request

    async def noting(url: str, route: str, *arguments: Any, **options: Any) -> Any:
        if route != "/health":
            asked.append(url)
        return await request(url, route, *arguments, **options)

    client._request = noting  # type: ignore[method-assign]
    return asked


async def test_the_second_server_on_a_port_cannot_listen(
    model_directory: Path, make_model: Callable[[int], Any]
) -> None:
    early = bind("127.0.0.1", 0)
    late = bind("127.0.0.1", early.getsockname()[1])
    backend = await backend_of(make_model(0), model_directory)
    with early, late:
        early.listen()
        with pytest.raises(CannotListen):
            await HttpServer(App(backend, chat_of(model_directory))).serve(sockets=[late])
    await backend.close()


async def test_requests_go_to_the_engine_with_the_fewest_in_flight(serve: Serve) -> None:
    async with serve() as first, serve() as second, client_of([first, second]) as client:
        await client.pause()
        tasks = [asyncio.create_task(client.generate([5], ONE)) for _ in range(6)]
        while sum(health.waiting for health in await client.health()) < 6:
            await asyncio.sleep(0.01)
        assert [health.waiting for health in await client.health()] == [3, 3]
        await client.resume()
        assert all(completion.token_ids for completion in await asyncio.gather(*tasks))


async def test_a_session_keeps_its_engine_and_the_next_goes_where_fewer_are(serve: Serve) -> None:
    async with serve() as first, serve() as second, client_of([first, second]) as client:
        asked = note_requests(client)
        for _ in range(3):
            client.join("group")
        client.join("another")
        for session in ("group", "group", "another", "group", "another"):
            await client.generate([1, 2, 3], ONE, session=session)
        assert [url == asked[0] for url in asked] == [True, True, False, True, False]
        for _ in range(3):
            client.leave("group")
        client.join("third")
        await client.generate([1, 2, 3], ONE, session="third")
        assert asked[-1] == asked[0]  # "another" still counts on the other one


async def test_a_session_moves_when_its_engine_is_down(serve: Serve) -> None:
    async with serve() as alive, client_of(["http://127.0.0.1:9", alive], retry_for=5.0) as client:
        client.join("group")
        for _ in range(2):
            completion = await client.generate([1, 2, 3], ONE, session="group")
            assert len(completion.token_ids) == 1


async def test_an_engine_that_is_down_does_not_stop_the_other(serve: Serve) -> None:
    with bind("127.0.0.1", 0) as silent:  # bound, not listening: connections are refused
        async with serve() as alive, client_of([url_of(silent), alive]) as client:
            for _ in range(4):
                assert (await client.generate([5], ONE)).token_ids


async def test_weights_go_to_every_engine(
    serve: Serve, make_model: Callable[[int], Any], publish: Callable[[Any, Version], Path]
) -> None:
    version = Version(0, 1)
    path = publish(make_model(1), version)
    async with serve() as first, serve() as second, client_of([first, second]) as client:
        assert await client.update_weights(path, version)
        assert [health.version for health in await client.health()] == ["0-1", "0-1"]


async def test_an_engine_that_has_answered_is_not_asked_again_while_another_cannot_be_reached(
    serve: Serve, make_model: Callable[[int], Any], publish: Callable[[Any, Version], Path]
) -> None:
    version = Version(0, 1)
    path = publish(make_model(1), version)
    with bind("127.0.0.1", 0) as silent:
        async with serve() as alive, serve() as restarted:
            urls = [alive, url_of(silent)]
            async with client_of(lambda: urls) as client:
                asked = note_requests(client)
                task = asyncio.create_task(client.update_weights(path, version))
                while asked.count(url_of(silent)) < 2:
                    await asyncio.sleep(0.01)
                urls[1] = restarted
                assert await task == read_marker(path).checksum
                assert (asked.count(alive), asked.count(restarted)) == (1, 1)
                assert [health.version for health in await client.health()] == ["0-1", "0-1"]


async def test_an_engine_that_stays_away_does_not_keep_weights_from_the_others(
    serve: Serve, make_model: Callable[[int], Any], publish: Callable[[Any, Version], Path]
) -> None:
    path = publish(make_model(1), Version(0, 1))
    with bind("127.0.0.1", 0) as silent:
        async with serve() as alive, client_of([url_of(silent), alive], retry_for=3600.0) as client:
            asked = note_requests(client)
            assert await client.update_weights(path, Version(0, 1)) == read_marker(path).checksum
            assert (asked.count(url_of(silent)), asked.count(alive)) == (pool.BREAKER_FAILURES, 1)
            path = publish(make_model(2), Version(0, 2))
            assert await client.update_weights(path, Version(0, 2)) == read_marker(path).checksum
            assert asked.count(url_of(silent)) == pool.BREAKER_FAILURES  # it is known to be away


async def test_of_engines_that_all_were_given_up_one_that_is_back_is_enough(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as silent, bind("127.0.0.1", 0) as place:
        async with client_of([url_of(silent), url_of(place)], retry_for=0.5) as client:
            with pytest.raises(EngineUnavailable, match=r"0\.5 s"):
                await client.update_weights(tmp_path, Version(0, 1))
        async with client_of([url_of(silent), url_of(place)], retry_for=3600.0) as client:
            asked = note_requests(client)
            updating = asyncio.create_task(client.update_weights(tmp_path, Version(0, 1)))
            while len(asked) < 2 * pool.BREAKER_FAILURES:
                await asyncio.sleep(0.01)
            async with EngineStandIn(listener=place):
                assert await updating == "sum"


async def test_a_refusal_is_not_held_up_by_an_engine_that_cannot_be_reached(serve: Serve, tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as silent:
        async with serve() as alive, client_of([url_of(silent), alive], retry_for=3600.0) as client:
            with pytest.raises(EngineRejected, match=r"COMPLETE\.json"):
                await client.update_weights(tmp_path, Version(0, 1))


async def test_engines_that_answer_can_be_updated_without_the_others(
    serve: Serve, make_model: Callable[[int], Any], publish: Callable[[Any, Version], Path]
) -> None:
    version = Version(0, 1)
    path = publish(make_model(1), version)
    with bind("127.0.0.1", 0) as silent:
        async with serve() as first, serve() as second, client_of([first, url_of(silent), second]) as client:
            asked = note_requests(client)
            assert list(await client.health_by_url()) == [first, second]
            await client.update_weights(path, version, [second])
            assert [health.version for health in (await client.health_by_url()).values()] == ["0-0", "0-1"]
            asked.clear()
            with pytest.raises(EngineUnavailable):
                await client.update_weights(path, version, [url_of(silent)])
            assert len(asked) == 1


async def test_a_restarted_engine_is_found_at_its_new_address(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "inference.json"
    async with client_of(tmp_path, retry_for=30) as client:
        async with serve() as old:
            write_endpoint(file, Endpoint(old, pid=1))
            assert (await client.generate([5], ONE)).token_ids
        task = asyncio.create_task(client.generate([5], ONE))
        await asyncio.sleep(0.1)
        async with serve() as new:
            write_endpoint(file, Endpoint(new, pid=2))
            assert (await task).token_ids


async def test_an_engine_that_cannot_be_reached_is_given_up_after_a_while() -> None:
    with bind("127.0.0.1", 0) as silent:
        async with client_of([url_of(silent)], retry_for=0.2) as client:
            with pytest.raises(EngineUnavailable, match=r"0\.2 s"):
                await client.generate([5], ONE)
            with pytest.raises(EngineUnavailable):
                await client.wait_ready(0.1)


async def test_no_endpoint_yet_is_unavailable(tmp_path: Path) -> None:
    async with client_of(tmp_path) as client:
        with pytest.raises(EngineUnavailable):
            await client.wait_ready(0.1)


async def test_an_engine_that_takes_too_long_is_a_timeout(serve: Serve) -> None:
    async with serve() as url, client_of([url]) as patient, client_of(lambda: [url], timeout=0.2) as client:
        await patient.pause()
        with pytest.raises(EngineTimeout, match=r"0\.2 s"):
            await client.generate([5], ONE)


async def test_a_refusal_carries_the_servers_words_and_is_not_retried(serve: Serve) -> None:
    async with serve() as url, client_of([url]) as client:
        with pytest.raises(EngineRejected, match="token_ids"):
            await client.generate([], ONE)


async def test_a_failure_in_the_engine_has_its_own_error(
    serve: Serve, make_model: Callable[[int], Any], publish: Callable[[Any, Version], Path]
) -> None:
    broken = make_model(1)
    broken.model.norm.weight.data.fill_(float("nan"))
    async with serve() as url, client_of([url]) as client:
        await client.update_weights(publish(broken, Version(0, 1)), Version(0, 1))
        with pytest.raises(EngineFailed):
            await client.generate([5], ONE)


def test_spans_become_one_step_per_token() -> None:
    spans = [WeightVersionSpan("0-3", 0, 2), WeightVersionSpan("1-2", 2, 3)]
    assert Completion([1, 2, 3], [0.0] * 3, spans, "stop").steps.tolist() == [3, 3, 2]


def test_one_string_is_not_a_list_of_urls() -> None:
    with pytest.raises(TypeError):
        EngineClient("http://127.0.0.1:1")


async def test_wait_ready_waits_for_the_expected_number_of_engines(serve: Serve, tmp_path: Path) -> None:
    async with serve() as first, serve() as second, client_of(tmp_path) as client:
        write_endpoint(tmp_path / "inference.json", Endpoint(first, pid=1))
        assert len(await client.wait_ready(5.0)) == 1
        with pytest.raises(EngineUnavailable, match="1 of 2"):
            await client.wait_ready(0.1, at_least=2)
        write_endpoint(tmp_path / "inference-1.json", Endpoint(second, pid=2))
        assert len(await client.wait_ready(5.0, at_least=2)) == 2


async def test_wait_ready_goes_on_with_some_engines_once_the_others_had_their_time(
    serve: Serve, tmp_path: Path
) -> None:
    async with serve() as first, client_of(tmp_path) as client:
        write_endpoint(tmp_path / "inference.json", Endpoint(first, pid=1))
        write_endpoint(tmp_path / "inference-1.json", Endpoint("http://127.0.0.1:1", pid=2))
        assert len(await client.wait_ready(5.0, at_least=3, settle_s=0.2)) == 1


async def test_engines_that_start_slowly_are_polled_as_often_as_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    async with client_of(tmp_path) as client:
        monkeypatch.setattr(asyncio, "sleep", sleep)
        with pytest.raises(EngineUnavailable):
            await client.wait_ready(0.2)
    assert max(delays) == READY_POLL_S


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"error": {"message": "engine", "code": 500}}', "engine"),
        (b'{"error": "pause failed"}', "pause failed"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<html>", "<html>"),
    ],
)
def test_every_form_of_an_error_is_read(content: bytes, problem: str) -> None:
    assert server_message(content) == problem
