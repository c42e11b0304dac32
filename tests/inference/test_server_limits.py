"""Limits: bodies that are too large, clients that disconnect, more requests than the queue holds."""

import asyncio
import gc
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request as HttpRequest

from headrace.config.inference import InferenceConfig
from headrace.errors import AGAIN
from headrace.inference.backend import MAX_STOP_TOKEN_IDS, EngineState, EngineStopped, InvalidRequest
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.embedded.backend import EmbeddedBackend, start_embedded
from headrace.inference.embedded.engine import Engine
from headrace.inference.schema import Health, SamplingParams
from headrace.inference.server import app, main
from headrace.inference.server.app import (
    LONG_BODY_BYTES,
    MAX_NAME_CHARS,
    MAX_OTHER_VALUES,
    TOKENIZE_LENGTHS,
)
from headrace.inference.server.chat import ChatRequest
from headrace.inference.server.request_bodies import LargeBodies, exceeds_json_limits, read_body
from tests.inference.serving import ADMIN_KEY, backend_of, chat_of, connect, engine_of, served

GENERATE, CHAT, COMPLETE = "/inference/v1/generate", "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
ASKED: dict[str, Any] = {GENERATE: {"token_ids": [5]}, CHAT: {"messages": HELLO}, COMPLETE: {"prompt": "a"}}
"""The least that each route wants."""
MB = 2**20


@pytest_asyncio.fixture
async def backend(model: Any, model_directory: Path) -> EmbeddedBackend:
    return await backend_of(model, model_directory, max_running=4, max_waiting=6)


@pytest_asyncio.fixture
async def http(backend: EmbeddedBackend, model_directory: Path) -> AsyncIterator[aiohttp.ClientSession]:
    async with served(backend, chat_of(model_directory), max_body=MB) as url:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with aiohttp.ClientSession(url, headers=headers) as session:
            yield session


async def until(backend: EmbeddedBackend, condition: Callable[[EngineState], bool]) -> None:
    """The test's own limit is the deadline."""
    while not condition(backend.state()):
        await asyncio.sleep(0.005)


async def in_chunks(size: int) -> AsyncIterator[bytes]:
    yield b'{"token_ids": [5], "filler": "'
    for _ in range(size // MB):
        yield b"x" * MB
    yield b'"}'


@pytest.mark.parametrize(
    ("path", "announced"), [(GENERATE, True), (GENERATE, False), (CHAT, True), ("/tokenize", False)]
)
async def test_a_body_of_50_mb_is_refused_and_the_next_one_served(
    http: aiohttp.ClientSession, path: str, announced: bool
) -> None:
    data: Any = b"x" * (50 * MB) if announced else in_chunks(50 * MB)
    async with http.post(path, data=data) as answer:
        assert answer.status == 413
        assert "larger than 1 MB" in (await answer.json())["error"]["message"]
    async with http.post(GENERATE, json={"token_ids": [5], "sampling_params": {"max_tokens": 1}}) as answer:
        assert answer.status == 200


async def test_expect_continue_is_answered_before_the_body(http: aiohttp.ClientSession) -> None:
    url = urlsplit(str(http._base_url))
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {50 * MB}\r\nExpect: 100-continue\r\n\r\n"
    writer.write(head.encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


NO_REQUESTS = [
    b"[" * 100_000,
    b'{"messages": ' + b'[{"a":' * 50_000,
    b'{"token_ids": [' + b"[" * 5000 + b"]" * 5000 + b"]}",
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"token_ids": [NaN]}',
    b'{"token_ids": [1e999]}',
    b'{"token_ids": [' + b"9" * 5000 + b"]}",
    b'{"token_ids": [5], "sampling_params": {"seed": ' + b"9" * 400 + b"}}",
    b"null",
    b"[]",
    b'"text"',
]


async def test_invalid_requests_are_rejected(http: aiohttp.ClientSession) -> None:
    for path in (GENERATE, CHAT, COMPLETE, "/tokenize", "/detokenize"):
        for body in NO_REQUESTS:
            async with http.post(path, data=body) as answer:
                assert answer.status == 400, (path, body[:50], await answer.text())
                assert (await answer.json())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "requests"),
    [
        (GENERATE, {"token_ids": [5]}, 1),
        (GENERATE, {"token_ids": [5], "stream": True}, 1),
        (CHAT, {"messages": HELLO, "n": 3}, 3),
        (CHAT, {"messages": HELLO, "n": 3, "stream": True}, 3),
        (COMPLETE, {"prompt": ["a", "b"]}, 2),
        (COMPLETE, {"prompt": ["a", "b"], "stream": True}, 2),
    ],
)
async def test_a_client_that_vanishes_before_the_first_token_cancels_its_requests(
    http: aiohttp.ClientSession, backend: EmbeddedBackend, path: str, body: Any, requests: int
) -> None:
    await backend.pause()
    task = asyncio.create_task(_read(http, path, body))
    await until(backend, lambda state: state.waiting == requests)
    task.cancel()
    await until(backend, lambda state: state.waiting == 0)
    assert backend.state().running == 0


async def _read(http: aiohttp.ClientSession, path: str, body: Any) -> bytes:
    async with http.post(path, json=body) as answer:
        return await answer.read()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"token_ids": [5], "sampling_params": {"ignore_eos": True}}),
        (CHAT, {"messages": HELLO, "n": 3, "ignore_eos": True, "return_token_ids": True}),
        (COMPLETE, {"prompt": ["a", "b"], "ignore_eos": True, "max_tokens": 4000, "return_token_ids": True}),
    ],
)
async def test_a_client_that_vanishes_in_the_middle_of_a_stream_cancels_its_requests(
    model: Any, model_directory: Path, path: str, body: Any
) -> None:
    backend = await backend_of(model, model_directory, max_model_len=4096)  # far more than is sampled before that
    async with served(backend, chat_of(model_directory)) as url, aiohttp.ClientSession(url) as http:
        answer = await http.post(path, json={**body, "stream": True})
        while b'"token_ids":[' not in await answer.content.readline():
            pass
        assert not backend.state().finished  # tokens come before there are all
        await backend.pause()
        answer.close()
        await until(backend, lambda state: state.running + state.waiting == 0)
        assert set(backend.state().finished) == {"cancelled"}


async def test_one_bad_prompt_of_a_list_costs_the_whole_list_and_nothing_is_left(
    http: aiohttp.ClientSession, backend: EmbeddedBackend
) -> None:
    await backend.pause()
    async with http.post(COMPLETE, json={"prompt": [[5], [6], [264]]}) as answer:
        assert answer.status == 400
    await until(backend, lambda state: state.running + state.waiting == 0)


@pytest.mark.timeout(10)
async def test_requests_beyond_the_queue_are_rejected_and_waiting_ones_served(
    http: aiohttp.ClientSession, backend: EmbeddedBackend
) -> None:
    await backend.pause()
    one = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
    tasks = [asyncio.create_task(_read(http, GENERATE, one)) for _ in range(10)]  # four may run, six wait
    await until(backend, lambda state: state.waiting == 10)
    async with http.post(GENERATE, json=one) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert (await answer.json())["error"]["type"] == "overloaded"
    async with http.get("/health") as answer:
        assert (await answer.json())["waiting"] == 10
    await backend.resume()
    assert all("choices" in json.loads(content) for content in await asyncio.gather(*tasks))


@pytest.mark.timeout(60)
async def test_a_client_backs_off_from_a_full_server_until_everything_is_served(
    http: aiohttp.ClientSession, backend: EmbeddedBackend
) -> None:
    async def refused() -> int:
        async with http.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return next((int(line.split()[1]) for line in lines if GENERATE in line and 'status="429"' in line), 0)

    client = EngineClient([str(http._base_url)], retry_for=60)
    await backend.pause()
    tasks = [asyncio.create_task(client.generate([5], SamplingParams(max_tokens=1))) for _ in range(30)]
    while await refused() < 20:  # ten fit: four that may run, six that wait
        await asyncio.sleep(0.01)
    await backend.resume()
    assert all(len(completion.token_ids) == 1 for completion in await asyncio.gather(*tasks))
    # All pause for the second in Retry-After: without that there would be one every 50 ms from each.
    assert await refused() <= 60
    await client.close()


@pytest.mark.timeout(10)
async def test_a_list_that_does_not_fit_in_the_queue_occupies_none_of_it(
    http: aiohttp.ClientSession, backend: EmbeddedBackend
) -> None:
    await backend.pause()
    first = asyncio.create_task(_read(http, COMPLETE, {"prompt": ["a"] * 4, "max_tokens": 1}))
    await until(backend, lambda state: state.waiting == 4)
    async with http.post(COMPLETE, json={"prompt": ["a"] * 7}) as answer:
        assert answer.status == 429
    await until(backend, lambda state: state.waiting == 4)
    await backend.resume()
    assert len(json.loads(await first)["choices"]) == 4


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETE, {"prompt": ["a"] * 11}), (COMPLETE, {"prompt": ["a", "b"], "n": 6}), (CHAT, {"n": 11})],
)
async def test_more_completions_than_the_limit_are_invalid_not_overloaded(
    http: aiohttp.ClientSession, path: str, body: Any
) -> None:
    async with http.post(path, json={**ASKED[path], "max_tokens": 1, **body}) as answer:
        assert answer.status == 400
        assert "limit of 10" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (GENERATE, {"sampling_params": {"stop_token_ids": [5] * (MAX_STOP_TOKEN_IDS + 1)}}, "stop_token_ids"),
        (GENERATE, {"sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        (COMPLETE, {"stop_token_ids": [5] * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
        (CHAT, {"stop_token_ids": [5] * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids"),
        (GENERATE, {"request_id": "x" * (MAX_NAME_CHARS + 1)}, "request_id"),
        *((path, {"cache_salt": "x" * (MAX_NAME_CHARS + 1)}, "cache_salt") for path in (GENERATE, COMPLETE, CHAT)),
    ],
)
async def test_names_kept_by_waiting_requests_are_short(
    http: aiohttp.ClientSession, path: str, body: Any, field: str
) -> None:
    async with http.post(path, json={**ASKED[path], **body}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["message"].startswith(field)


async def test_stop_tokens_may_be_as_many_as_that_and_outside_the_vocabulary(http: aiohttp.ClientSession) -> None:
    params = {"max_tokens": 1, "stop_token_ids": [10_000] * MAX_STOP_TOKEN_IDS}
    names = {"cache_salt": "x" * MAX_NAME_CHARS, "request_id": "x" * MAX_NAME_CHARS}
    async with http.post(GENERATE, json={"token_ids": [5], "sampling_params": params, **names}) as answer:
        assert answer.status == 200


LONGEST = 128 * len("<|endoftext|>")
"""Characters that may just be 128 tokens, the most here."""


async def test_messages_that_are_too_long_together_are_not_made_into_tokens(http: aiohttp.ClientSession) -> None:
    messages = [{"role": "user", "content": "a" * 8}] * (LONGEST // 8 + 2)
    async with http.post(CHAT, json={"messages": messages}) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["message"].startswith(f"messages: a text of {8 * len(messages)} char")


async def test_what_is_only_counted_may_be_longer_but_not_by_far(http: aiohttp.ClientSession) -> None:
    most = TOKENIZE_LENGTHS * LONGEST
    for body, status in (
        ({"prompt": "a" * most}, 200),
        ({"prompt": "a" * (most + 13)}, 400),
        ({"messages": [{"role": "user", "content": "a" * (most // 2)}] * 3}, 400),
    ):
        async with http.post("/tokenize", json=body) as answer:
            assert answer.status == status
            content = await answer.json()
            assert status == 200 or "16 times max_model_len" in content["error"]["message"]
    for count, status in ((TOKENIZE_LENGTHS * 128, 200), (TOKENIZE_LENGTHS * 128 + 1, 400)):
        async with http.post("/detokenize", json={"tokens": [5] * count}) as answer:
            assert answer.status == status


LISTS: list[Any] = [[]] * MAX_OTHER_VALUES
IDS = [5] * (MAX_OTHER_VALUES + TOKENIZE_LENGTHS * 128 + 2)
"""More than any route takes, where a sequence has at most 128."""


async def test_a_body_of_more_values_than_any_request_has_is_not_decoded(http: aiohttp.ClientSession) -> None:
    for path, body in (
        (GENERATE, {"token_ids": IDS}),
        (GENERATE, {"token_ids": [5], "priority": LISTS}),
        (COMPLETE, {"prompt": IDS}),
        (COMPLETE, {"prompt": [[5], IDS]}),
        (COMPLETE, {"prompt": ["a"] * MAX_OTHER_VALUES}),
        (CHAT, {"messages": [{}] * MAX_OTHER_VALUES}),
        ("/tokenize", {"messages": [{"role": "user", "content": LISTS}]}),
        ("/detokenize", {"tokens": IDS}),
        ("/pause", {"tags": LISTS}),
    ):
        async with http.post(path, data=json.dumps(body, separators=(",", ":"))) as answer:
            assert answer.status == 400
            message = (await answer.json())["error"]["message"]
        assert "max_model_len = 128" in message, (path, list(body))


json_values = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('"\\,[{é\n'), max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", '"', "\\", ","]), inner),
    max_leaves=20,
)


def counted(value: Any) -> int:
    """Texts, keys, lists and objects."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(counted, value.values()))
    return 1 + sum(map(counted, value)) if isinstance(value, list) else int(isinstance(value, str))


@settings(derandomize=True, max_examples=25, deadline=None)
@given(value=json_values, spelled=st.booleans())
def test_what_json_holds_is_counted_as_a_decoder_would_find_it(value: Any, spelled: bool) -> None:
    content = json.dumps(value, ensure_ascii=spelled).encode()
    others = counted(value)
    assert not exceeds_json_limits(content, 4, others)  # no list has more than four
    assert not others or exceeds_json_limits(content, len(content), others - 1)


def test_the_longest_list_counts() -> None:
    lists = json.dumps({"a": [[5] * 50, [5] * 90, [5] * 30]}).encode()
    assert not exceeds_json_limits(lists, 90, 6)
    assert exceeds_json_limits(lists, 80, 6)


async def test_a_long_text_may_be_full_of_what_json_is_made_of(model: Any, model_directory: Path) -> None:
    backend = await backend_of(model, model_directory, max_model_len=LONG_BODY_BYTES)
    async with served(backend, chat_of(model_directory)) as url, aiohttp.ClientSession(url) as http:
        text = ',["\\' * (MAX_OTHER_VALUES // 2)
        async with http.post("/tokenize", json={"prompt": text}) as answer:
            assert (await answer.json())["count"] == len(text)


@pytest.mark.parametrize(
    ("path", "field", "checks"), [(COMPLETE, "prompt", "check_prompt"), ("/detokenize", "tokens", "check_token_ids")]
)
async def test_many_token_ids_are_checked_beside_the_event_loop(
    model: Any, model_directory: Path, monkeypatch: pytest.MonkeyPatch, path: str, field: str, checks: str
) -> None:
    threads = []

    def check(*_: Any) -> None:
        threads.append(threading.current_thread())
        raise InvalidRequest("enough")

    monkeypatch.setattr(app, checks, check)
    backend = await backend_of(model, model_directory, max_model_len=LONG_BODY_BYTES)
    async with served(backend, chat_of(model_directory)) as url, aiohttp.ClientSession(url) as http:
        for count in (5, LONG_BODY_BYTES // 2):
            async with http.post(path, json={field: [5] * count}) as answer:
                assert answer.status == 400
    small, large = threads
    assert small is threading.current_thread() is not large


async def test_long_texts_are_made_into_tokens_one_at_a_time(model: Any, model_directory: Path) -> None:
    chat, turn, alone = chat_of(model_directory), threading.Lock(), []
    encode = chat.tokenizer.encode

    def slowly(text: str, **options: Any) -> list[int]:
        alone.append(turn.acquire(blocking=False))
        time.sleep(0.02)  # time enough for the others
        if alone[-1]:
            turn.release()
        return encode(text, **options)

    chat.tokenizer.encode = slowly  # type: ignore[method-assign, assignment]
    backend = await backend_of(model, model_directory, max_model_len=LONG_BODY_BYTES)
    async with served(backend, chat) as url, aiohttp.ClientSession(url) as http:
        body = {"prompt": "a" * LONG_BODY_BYTES}
        await asyncio.gather(*[_read(http, "/tokenize", body) for _ in range(4)])
    assert alone == [True] * 4


async def test_admin_calls_wait_for_no_long_text(backend: EmbeddedBackend) -> None:
    done = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, done.wait)
    try:
        await asyncio.wait_for(backend.pause(), 10)
        await asyncio.wait_for(backend.resume(), 10)
    finally:
        done.set()
    await busy
    await backend.close()
    with pytest.raises(EngineStopped, match="shutting down"):
        await backend.pause()


async def test_a_large_body_holds_its_permit_until_it_has_been_processed() -> None:
    large = LargeBodies(1)

    async def receive() -> Any:
        return {"type": "http.request", "body": b'["' + b"x" * 2 * MB + b'"]', "more_body": False}

    http = HttpRequest({"type": "http", "method": "POST", "headers": []}, receive)
    async with read_body(http, 4 * MB, large) as content:
        assert large._places.locked() and len(content) > 2 * MB
    assert not large._places.locked()


async def test_messages_are_let_go_before_the_answer(http: aiohttp.ClientSession, backend: EmbeddedBackend) -> None:
    def held() -> list[ChatRequest]:
        return [body for body in gc.get_objects() if type(body) is ChatRequest]

    await backend.pause()
    others = held()  # of servers before, which no collection has met yet
    task = asyncio.create_task(_read(http, CHAT, {"messages": HELLO, "max_tokens": 1}))
    await until(backend, lambda state: state.waiting == 1)
    assert [body.messages for body in held() if not any(body is other for other in others)] == [[]]
    await backend.resume()
    assert "choices" in json.loads(await task)


async def test_a_dead_engine_is_an_unhealthy_server(model: Any, model_directory: Path) -> None:
    engine = engine_of(model, model_directory)
    backend = await connect(engine)
    async with served(backend, chat_of(model_directory)) as url, aiohttp.ClientSession(url) as http:
        fall_ill(engine)
        for path in (GENERATE, GENERATE, CHAT):  # the first is there when it happens
            async with http.post(path, json=ASKED[path]) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                assert "the GPU fell off" in (await answer.json())["error"]["message"]
        async with http.get("/health") as answer:
            health = await answer.json()
            assert answer.status == 503
            assert "the GPU fell off" in health["status"] and set(health) == set(Health.__struct_encode_fields__)
        async with http.get("/metrics") as answer:
            assert "headrace_failed 1" in (await answer.text()).splitlines()


def fall_ill(engine: Engine) -> None:
    """The next step fails in a way that no request is to blame for."""

    def step() -> None:
        raise RuntimeError("the GPU fell off")

    engine.step = step  # type: ignore[method-assign]


def test_a_server_whose_engine_dies_reports_it_and_exits_for_a_restart(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[EmbeddedBackend] = []
    answers: list[int] = []

    async def start(*arguments: Any) -> EmbeddedBackend:
        engines.append(await start_embedded(*arguments))
        return engines[0]

    def ask(url: str) -> None:
        assert engines[0]._process is not None
        engines[0]._process.kill()
        for path, data in ((GENERATE, b'{"token_ids": [5]}'), ("/health", None)):
            try:
                urllib.request.urlopen(url + path, data)
            except urllib.error.HTTPError as error:
                answers.append(error.code)

    monkeypatch.setattr(main, "start_embedded", start)
    config = InferenceConfig(model={"name": str(model_directory)}, max_model_len=64, max_running=2)
    threads: list[threading.Thread] = []

    def announce(url: str) -> None:
        threads.append(threading.Thread(target=ask, args=(url,)))
        threads[0].start()

    with pytest.raises(SystemExit) as left:
        main.serve(config, status=None, run=None, announce=announce)
    threads[0].join()
    assert left.value.code == AGAIN == 75
    assert answers == [503, 503]


async def test_unknown_routes_and_methods_are_4xx(http: aiohttp.ClientSession) -> None:
    for method, path in (("DELETE", GENERATE), ("GET", CHAT), ("PUT", "/health"), ("POST", "/nope")):
        async with http.request(method, path) as answer:
            assert answer.status in (404, 405)
            assert path in (await answer.json())["error"]["message"]
