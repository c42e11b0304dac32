"""Arbitrary requests to the server: none ends in a 5xx, hangs, or is left in the engine."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.inference.embedded.backend import EmbeddedBackend
from tests.inference.conftest import make_qwen3
from tests.inference.serving import ADMIN_KEY, backend_of, chat_of, served

LONGEST = 48
PATIENCE = 60.0
"""Seconds for one answer: far more than any takes, since a request that hangs is what is looked for."""

numbers = st.sampled_from([-(2**63), -1, 0, 1, 2, 20, 21, 128, 129, 2**31, 2**63, 2**64, 10**30, 10**400])
floats = st.sampled_from([-1.0, 0.0, 1e-300, 0.5, 1.0, 2.0, 1e308, float("nan"), float("inf")])
wild = st.recursive(
    st.none() | st.booleans() | numbers | floats | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


ids = st.lists(st.integers(0, 263), min_size=1, max_size=LONGEST + 2)
text = st.text(max_size=LONGEST)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": text},
    optional={"name": text},
)
tool = st.fixed_dictionaries({"type": st.just("function"), "function": st.just({"name": "f"})})
SAMPLING: dict[str, Any] = {
    "temperature": st.sampled_from([0, 0.5, 1, 2]),
    "top_p": st.sampled_from([0.1, 0.9, 1]),
    "top_k": st.sampled_from([-1, 0, 1, 5, 1000]),
    "min_p": st.sampled_from([0, 0.1, 1]),
    "seed": st.integers(-5, 5),
    "stop": st.sampled_from(["a", ["b", "cd"], [], "\n"]),
    "stop_token_ids": st.just([5, 258]),
    "ignore_eos": st.booleans(),
    "max_tokens": st.integers(1, 8),
}
OPENAI: dict[str, Any] = {
    **SAMPLING,
    "model": st.just("tiny"),
    "n": st.integers(1, 3),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}),
    "return_token_ids": st.booleans(),
    "presence_penalty": st.just(0),
    "min_tokens": st.sampled_from([None, 0, 1]),
    "logit_bias": st.just({}),
}
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/inference/v1/generate": (
        {"token_ids": ids},
        {
            "sampling_params": st.fixed_dictionaries(
                {},
                optional={**SAMPLING, "logprobs": st.integers(0, 20), "prompt_logprobs": st.just(1)},
            ),
            "stream": st.booleans(),
            "urgent": st.booleans(),
            "cache_salt": text,
            "request_id": text,
        },
    ),
    "/v1/chat/completions": (
        {"messages": st.lists(message, max_size=3)},
        {
            **OPENAI,
            "logprobs": st.booleans(),
            "top_logprobs": st.integers(0, 20),
            "tools": st.lists(tool, max_size=2),
            "tool_choice": st.sampled_from(["auto", "none", "required"]),
            "max_completion_tokens": st.integers(0, 8),
        },
    ),
    "/v1/completions": (
        {"prompt": st.one_of(text, st.lists(text, max_size=3), ids, st.lists(ids, max_size=3))},
        {
            **OPENAI,
            "max_tokens": st.integers(0, 8),
            "echo": st.booleans(),
            "logprobs": st.integers(0, 20),
            "prompt_logprobs": st.integers(0, 20),
            "best_of": st.integers(1, 2),
            "add_special_tokens": st.booleans(),
        },
    ),
    "/tokenize": ({"prompt": text}, {"messages": st.lists(message, max_size=2), "add_special_tokens": st.booleans()}),
    "/detokenize": ({"tokens": ids}, {"model": st.just("tiny")}),
    "/update_weights": (
        {"path": st.sampled_from(["", "/", "/nowhere", "a\0b", "x" * 5000]), "incarnation": numbers, "step": numbers},
        {},
    ),
    "/v1/load_lora_adapter": ({"lora_name": text, "lora_path": st.sampled_from(["/", "/nowhere", "\0"])}, {}),
    "/v1/unload_lora_adapter": ({"lora_name": text}, {}),
}


def spoil(body: Any, draw: st.DrawFn) -> None:
    """Put something else somewhere into a request."""
    place, inside = body, body
    while isinstance(inside, dict | list) and inside and draw(st.booleans()):
        place = inside
        key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inside = place[key]
    if place is not inside:
        place[key] = draw(wild)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """Requests that are well-formed, that have one thing or two wrong, that are broken, and mere bytes."""
    needed, optional = FIELDS[path]
    body = draw(st.fixed_dictionaries(needed, optional=optional))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        spoil(body, draw)
    content = json.dumps(body).encode()
    if draw(st.integers(0, 15)) == 9:
        place = draw(st.integers(0, len(content)))
        return content[:place] + draw(st.binary(max_size=3)) + content[place:]
    return content if draw(st.integers(0, 31)) != 17 else draw(st.binary(max_size=50))


requests = st.sampled_from(sorted(FIELDS)).flatmap(lambda path: st.tuples(st.just(path), bodies(path)))
header_values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=10)


class Server:
    """The real server, over sockets, on an event loop in a thread of its own."""

    def __init__(self, model_directory: Path) -> None:
        self.backend: EmbeddedBackend
        self.address = ""
        self._directory = model_directory
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> "Server":
        self._thread.start()
        assert self._up.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.backend = await backend_of(make_qwen3(0), self._directory, max_model_len=LONGEST, max_waiting=64)
        async with served(self.backend, chat_of(self._directory), max_body=1 << 20) as url:
            self.address = url.removeprefix("http://")
            self._up.set()
            await self._stop.wait()


@pytest.fixture(scope="module")
def server(model_directory: Path) -> Iterator[Server]:
    with Server(model_directory) as server:
        yield server


def send(server: Server, method: str, path: str, body: bytes, headers: dict[str, str]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(server.address, timeout=PATIENCE)
    connection.request(method, path, body, {"Authorization": f"Bearer {ADMIN_KEY}", **headers})
    return connection.getresponse()


def check_answer(answer: http.client.HTTPResponse) -> None:
    content = answer.read()
    assert answer.status < 500, content
    if answer.status >= 400:
        assert json.loads(content)["error"]["message"]
    elif answer.headers["Content-Type"].startswith("text/event-stream"):
        assert content.endswith(b"data: [DONE]\n\n"), content
    else:
        json.loads(content)


def check_idle(server: Server) -> None:
    """Everything that was asked for has ended, and the server still answers."""
    deadline = time.monotonic() + PATIENCE
    while (state := server.backend.state()).running + state.waiting:
        assert time.monotonic() < deadline, state
        time.sleep(0.01)
    assert state.failure is None
    answer = send(server, "POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 2, "ignore_eos": true}', {})
    assert json.loads(answer.read())["usage"]["completion_tokens"] == 2


def fuzz(server: Server, examples: int) -> None:
    @settings(
        derandomize=True, max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(request=requests, stays=st.sampled_from([True] * 7 + [False]), session=header_values)
    def try_one(request: tuple[str, bytes], stays: bool, session: str) -> None:
        path, body = request
        if stays:
            check_answer(send(server, "POST", path, body, {"X-Session-ID": session}))
        else:
            connection = http.client.HTTPConnection(server.address, timeout=PATIENCE)
            connection.request("POST", path, body)
            connection.close()

    try_one()
    check_idle(server)


def test_no_request_ends_in_a_5xx_or_is_left_behind(server: Server) -> None:
    fuzz(server, 120)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_no_request_of_very_many_ends_in_a_5xx_or_is_left_behind(server: Server) -> None:
    fuzz(server, 4000)


@settings(derandomize=True, max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW"]),
    path=st.sampled_from([*FIELDS, "/health", "/metrics", "/v1/models", "/resume", "/", "//", "/..", "/%00", "/?%ff"]),
    key=header_values,
)
def test_no_method_no_path_and_no_key_ends_in_a_5xx(server: Server, method: str, path: str, key: str) -> None:
    answer = send(server, method, path, b"", {"Authorization": key})
    answer.read()
    assert answer.status < 500
