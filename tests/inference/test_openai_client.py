"""Chat completions over HTTP: against a stand-in that misbehaves, and the server that ships."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.errors import BadInput
from headrace.inference.client.openai_client import (
    OpenAIBusy,
    OpenAIClient,
    OpenAIError,
    OpenAIFailed,
    OpenAIRejected,
    OpenAITimeout,
    OpenAIUnreachable,
    Usage,
    backoff_delays,
    retry,
)
from headrace.inference.embedded.engine import Engine
from tests.inference.openai_stand_in import OpenAIStandIn, error
from tests.inference.serving import client_of_engine
from tests.refusals import refused

ASK = [{"role": "user", "content": "How are you?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
async def server() -> AsyncIterator[OpenAIStandIn]:
    async with OpenAIStandIn(lambda asked: "Fine.") as server:
        yield server


@pytest.fixture
async def client(server: OpenAIStandIn) -> AsyncIterator[OpenAIClient]:
    client = OpenAIClient(server.url + "/", "small")
    yield client
    await client.close()


async def test_an_answer_has_its_message_reason_and_usage(client: OpenAIClient, server: OpenAIStandIn):
    answer = await client.chat(ASK)
    assert (answer.text, answer.finish_reason, answer.usage) == ("Fine.", "stop", Usage(3, 2))
    assert answer.message == {"role": "assistant", "content": "Fine."}
    assert server.asked == [{"model": "small", "messages": ASK}]


async def test_what_is_asked_for_is_sent_and_nothing_else(client: OpenAIClient, server: OpenAIStandIn):
    await client.chat(ASK, tools=[TOOL], temperature=0.0, max_tokens=7, extra={"top_p": 0.5})
    sent = {"tools": [TOOL], "temperature": 0.0, "max_tokens": 7, "top_p": 0.5}
    assert server.asked == [{"model": "small", "messages": ASK, **sent}]


async def test_tool_calls_come_as_they_are_and_have_no_text(client: OpenAIClient, server: OpenAIStandIn):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {"choices": [{"message": message, "finish_reason": "tool_calls", "logprobs": None}]}
    server.respond = lambda asked: web.json_response(body)
    answer = await client.chat(ASK)
    assert (answer.message, answer.text, answer.usage) == (message, "", Usage())


async def test_models_are_listed(client: OpenAIClient):
    assert [model.id for model in await client.models()] == ["small", "large"]


async def test_the_key_is_that_of_the_variable_and_headers_go_along(
    server: OpenAIStandIn, monkeypatch: pytest.MonkeyPatch
):
    client = OpenAIClient(server.url, "small", "TEST_KEY", headers={"X-Title": "tests"})
    await client.chat(ASK)
    monkeypatch.setenv("TEST_KEY", "hunter2\n")
    await client.chat(ASK)
    assert [headers.get("Authorization") for headers in server.headers] == [None, "Bearer hunter2"]
    assert server.headers[1]["X-Title"] == "tests"
    server.respond = lambda asked: error(401, "Incorrect key")
    with pytest.raises(OpenAIRejected) as failure:
        await client.chat(ASK)
    assert "hunter2" not in str(failure.value)
    assert "TEST_KEY" not in str(failure.value)
    await client.close()


async def test_a_key_that_the_server_repeats_is_not_shown(server: OpenAIStandIn, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEST_KEY", "hunter2")
    client = OpenAIClient(server.url, "small", "TEST_KEY")
    for response in (error(401, "-" * 498 + "hunter2"), web.Response(text="-" * 498 + "hunter2")):
        server.respond = lambda asked, response=response: response
        with pytest.raises(OpenAIError, match=r"--\*\*") as failure:
            await client.chat(ASK)
        assert "hu" not in str(failure.value)
    await client.close()


@pytest.mark.parametrize("key", ["hunter\n2", "hunter2\u2026", "hünter2", "hunter\x7f2"])
async def test_an_invalid_key_is_refused_and_not_shown(
    server: OpenAIStandIn, monkeypatch: pytest.MonkeyPatch, key: str
):
    monkeypatch.setenv("TEST_KEY", key)
    client = OpenAIClient(server.url, "small", "TEST_KEY")
    with refused(key="TEST_KEY") as failure:
        await client.chat(ASK)
    assert "nter" not in str(failure.value)
    assert server.asked == []
    await client.close()


@pytest.mark.parametrize("value", ["hunter\n2", "hunter\x7f2", "h\u00fcnter2", " hunter2", "hunter2\n"])
def test_a_header_that_cannot_be_sent_is_refused_and_not_shown(value: str):
    with pytest.raises(BadInput, match="X-Secret") as failure:
        OpenAIClient("http://me:hunter3@host/v1", "small", headers={"X-Team": "mill", "X-Secret": value})
    assert "nter" not in str(failure.value)


async def test_a_password_in_the_address_is_used_and_not_shown(server: OpenAIStandIn):
    client = OpenAIClient(server.url.replace("//", "//me:hunt@er2@"), "small")
    await client.chat(ASK)
    assert server.headers[0]["Authorization"].startswith("Basic ")
    for response in (error(500, "it broke"), web.Response(text="not JSON"), web.json_response({"choices": []})):
        server.respond = lambda asked, response=response: response
        with pytest.raises(OpenAIError, match=f"{server.url}") as failure:
            await client.chat(ASK)
        assert "er2" not in str(failure.value)
    await client.close()
    with refused(key="base_url", value="host/v1"):
        OpenAIClient("me:hunter2@host/v1", "small")


async def test_a_refusal_for_want_of_a_key_names_the_variable(server: OpenAIStandIn):
    server.respond = lambda asked: error(401, "You need a key")
    client = OpenAIClient(server.url, "small", "KEY_THAT_IS_NOT_SET")
    with pytest.raises(OpenAIRejected, match=r"You need a key.*401.*KEY_THAT_IS_NOT_SET"):
        await client.chat(ASK)
    await client.close()


@pytest.mark.parametrize(
    ("response", "kind", "words", "transient"),
    [
        (error(400, "no such model"), OpenAIRejected, "^no such model.*400", False),
        (error(429, "slow down"), OpenAIBusy, "slow down", True),
        (error(500, "it broke"), OpenAIFailed, "it broke", True),
        (error(501, "not here"), OpenAIRejected, "not here", False),
        (web.json_response({"detail": "closed"}, status=503), OpenAIFailed, "^closed.*503", True),
        (web.Response(text="<html>bad gateway", status=502), OpenAIFailed, "^<html>bad gateway", True),
        (web.Response(status=404), OpenAIRejected, "404", False),
        (web.Response(text="[" * 100_000, status=500), OpenAIFailed, r"^\[{500} ", True),
        (web.Response(text="not JSON"), OpenAIFailed, "not JSON$", True),
        (web.Response(body=b'{"choices": ["\xff'), OpenAIFailed, "truncated", True),
        (web.json_response({"choices": []}), OpenAIFailed, "choices", True),
        (web.json_response({"choices": [{"text": "x"}]}), OpenAIFailed, "missing required field `message`", True),
    ],
)
async def test_a_failure_has_a_kind_and_quotes_the_server(
    client: OpenAIClient,
    server: OpenAIStandIn,
    response: web.Response,
    kind: type[OpenAIError],
    words: str,
    transient: bool,
):
    server.respond = lambda asked: response
    with pytest.raises(kind, match=words) as failure:
        await client.chat(ASK)
    assert failure.value.transient is transient


async def test_retry_after_is_reported(client: OpenAIClient, server: OpenAIStandIn):
    waits = []
    for header in ("7", "1.5", "-1", "nan", "Wed, 21 Oct 2026 07:28:00 GMT"):
        server.respond = lambda asked, header=header: error(429, "slow down", Retry_After=header)
        with pytest.raises(OpenAIBusy) as failure:
            await client.chat(ASK)
        waits.append(failure.value.retry_after)
    assert waits == [7.0, 1.5, None, None, None]


async def test_a_server_that_wants_no_pause_is_not_asked_without_one(client: OpenAIClient, server: OpenAIStandIn):
    server.respond = lambda asked: error(429, "slow down", Retry_After="0")
    with pytest.raises(OpenAIBusy):
        await retry(lambda: client.chat(ASK), backoff_delays(0.5))
    assert 2 <= len(server.asked) <= 3  # after 0.1 s and 0.2 s; 0.4 s more would be too late


async def test_a_server_that_does_not_answer_is_not_waited_for(server: OpenAIStandIn):
    server.hold = asyncio.Event()
    client = OpenAIClient(server.url, "small", timeout=0.1)
    with pytest.raises(OpenAITimeout, match=r"/chat/completions.*0\.1 s"):
        await client.chat(ASK)
    server.hold.set()
    assert (await client.chat(ASK)).text == "Fine."
    await client.close()


async def test_a_closed_port_is_unreachable(server: OpenAIStandIn):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        client = OpenAIClient(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "small")
        with pytest.raises(OpenAIUnreachable):
            await client.chat(ASK)
        await client.close()
    secure = OpenAIClient(server.url.replace("http:", "https:"), "small")
    with pytest.raises(OpenAIUnreachable, match="SSL"):
        await secure.chat(ASK)
    await secure.close()


async def test_no_more_requests_are_under_way_than_allowed(server: OpenAIStandIn):
    client = OpenAIClient(server.url, "small", max_concurrent=3)
    await asyncio.gather(*(client.chat(ASK) for _ in range(12)))
    assert len(server.asked) == 12
    assert server.most_at_once <= 3
    await client.close()


async def test_any_text_can_be_sent(client: OpenAIClient, server: OpenAIStandIn):
    texts = ["", "\x00\x7f", "\ud800", "0123456789" * 1_000_000]
    for text in texts:
        await client.chat([{"role": "user", "content": text}])
    assert [asked["messages"][0]["content"] for asked in server.asked] == texts


def test_a_client_serves_one_event_loop_after_another():
    async def chat(client: OpenAIClient, close: bool) -> str:
        async with OpenAIStandIn(lambda asked: "Fine.") as server:
            client.base_url = server.url
            text = (await client.chat(ASK)).text
            if close:
                await client.close()
            return text

    client = OpenAIClient("http://127.0.0.1:1", "small")
    assert [asyncio.run(chat(client, close)) for close in (True, False, True)] == ["Fine."] * 3


@pytest.mark.parametrize("url", ["localhost:8000", "", "ftp://x"])
def test_an_invalid_address_is_refused(url: str):
    with refused(key="base_url", value=url):
        OpenAIClient(url, "small")


async def test_the_server_that_ships_is_understood(model: Any, model_directory: Path):
    engine = Engine(model, max_model_len=64, max_running=2, eos_token_ids=[258], seed=0)
    async with client_of_engine(engine, model_directory) as engines:
        [url] = await engines.health_by_url()
        client = OpenAIClient(f"{url}/v1", "tiny")
        assert [model.id for model in await client.models()] == ["tiny"]
        answer = await client.chat([{"role": "user", "content": "hi"}], max_tokens=4, temperature=0.0)
        assert answer.message["role"] == "assistant"
        assert (answer.usage.completion_tokens, answer.finish_reason) == (4, "length")
        with pytest.raises(OpenAIRejected, match="max_tokens"):
            await client.chat([{"role": "user", "content": "hi"}], max_tokens=-1)
        await client.close()


def test_the_client_is_imported_without_what_only_a_call_needs():
    code = "import sys, json, headrace.inference.client.openai_client; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "httpx", "transformers"}.isdisjoint(json.loads(done.stdout))
