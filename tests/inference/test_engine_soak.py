"""Thousands of requests through the real server, with all that can happen to them, from a seed.

Clients that wait, stream, hang up in the middle, ask the same several times at once or ask for nonsense; new weights
and pauses meanwhile; and a KV cache so small that requests lose their place in it. What must hold: every request that
was accepted ends exactly once, every bad one gets its 4xx, nothing is left behind, and logprobs are those of a plain
forward by the weights of their version: of all greedy answers, and some of the others. Where the cache is kept when
weights change, that is so for answers that one version gave alone.
"""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pytest

from headrace.inference.client.http import HttpClient, HttpResponse, NotAStream
from headrace.inference.embedded import batch as window_module
from headrace.inference.embedded import scheduler as scheduler_module
from headrace.inference.embedded.backend import EmbeddedBackend, EmbeddedGeneration
from headrace.inference.embedded.engine import Engine
from headrace.inference.schema import GenerateResponse
from headrace.rollout.version import Version
from tests.inference.plain_forward import assert_close, assert_nothing_left, plain_logprobs, random_prompt
from tests.inference.serving import ADMIN_KEY, chat_of, connect, served

LONGEST = 96
CLIENTS = 24
ALIKE = 4
"""Requests that are the same and come together."""
CHECKED = 0.01
"""The share of answers that are not greedy whose logprobs are computed again."""
OFTEN = ("updates", "answered", "streamed", "asked alike", "hung up", "refused", "turned away")
KINDS = (*OFTEN, "left a stream", "conversed", "completed")
"""What must have become of some of them."""
WAIT = 120.0
GENERATE = "/inference/v1/generate"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
VERSIONS = [Version(0, step) for step in range(4)]

BAD: list[tuple[str, str, Any]] = [
    ("POST", GENERATE, {"token_ids": []}),
    ("POST", GENERATE, {"token_ids": [5, 264]}),
    ("POST", GENERATE, {"token_ids": [-1]}),
    ("POST", GENERATE, {"token_ids": [5] * LONGEST}),
    ("POST", GENERATE, {"token_ids": "five"}),
    ("POST", GENERATE, {"token_ids": [5], "model": "another"}),
    *(
        ("POST", GENERATE, {"token_ids": [5], "sampling_params": params})
        for params in (
            {"temperature": -1},
            {"temperature": "hot"},
            {"top_p": 0},
            {"top_k": -7},
            {"min_p": 2},
            {"max_tokens": 0},
            {"stop": [""]},
            {"logprobs": 99},
            {"prompt_logprobs": -1},
            {"n": 3},
        )
    ),
    ("POST", GENERATE, b"{"),
    ("POST", GENERATE, b"\xff\xfe"),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/completions", {"prompt": "x" * 1000}),
    ("POST", "/update_weights", {"path": "/", "incarnation": 0, "step": 9}),  # without the key
    ("GET", GENERATE, None),
    ("POST", "/nowhere", {}),
]


class Overloaded(Exception):
    """The server refused the request because its queue is full."""


class Kept(NamedTuple):
    """An answer to compute again."""

    prompt: list[int]
    temperature: float
    response: GenerateResponse


class Soak:
    """The clients, and what became of their requests."""

    def __init__(self, url: str, rng: random.Random, directories: dict[Version, Path]) -> None:
        self.url = url
        self.rng = rng
        self.http = HttpClient()
        self.became: Counter[str] = Counter()
        self.kept: list[Kept] = []
        self._directories = directories
        self._texts = [random_prompt(rng, LONGEST - 20) for _ in range(12)]
        self._kinds: dict[Callable[[], Awaitable[str]], int] = {
            self.generate: 60,
            self.stream: 12,
            self.ask_alike: 10,
            self.hang_up: 12,
            self.leave_a_stream: 6,
            self.ask_nonsense: 12,
            self.converse: 4,
            self.complete: 4,
        }

    async def run(self, count: int, updates: int) -> None:
        """So many requests; the weights change that often meanwhile."""
        left = iter(range(count))

        async def client() -> None:
            for number in left:
                if number % (count // updates) == count // updates - 1:
                    await asyncio.gather(self.change_weights(), self.retry(self.ask_alike))
                [kind] = self.rng.choices([*self._kinds], [*self._kinds.values()])
                self.became[await self.retry(kind)] += 1

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def retry(self, kind: Callable[[], Awaitable[str]]) -> str:
        while True:
            try:
                return await kind()
            except Overloaded:
                self.became["turned away"] += 1
                await asyncio.sleep(0.05)

    async def send(self, method: str, route: str, body: Any, **headers: str) -> HttpResponse:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        answer = await self.http.request(method, self.url, route, content, WAIT, headers)
        if answer.status == 429:
            raise Overloaded
        return answer

    async def events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        content = json.dumps({**body, "stream": True}).encode()
        try:
            async with contextlib.aclosing(self.http.stream("POST", self.url, GENERATE, content, WAIT)) as events:
                async for event in events:
                    yield json.loads(event)
        except NotAStream as error:
            if error.response.status != 429:
                raise
            raise Overloaded from error

    async def change_weights(self) -> None:
        """To any version, also one that was there before; sometimes while the engine is paused."""
        version = self.rng.choice(VERSIONS)
        body = {"path": str(self._directories[version]), "incarnation": version.incarnation, "step": version.step}
        routes: list[tuple[str, Any]] = [("/update_weights", body)]
        if self.rng.random() < 0.4:
            routes = [("/pause", None), *routes, ("/resume", None)]
        for route, content in routes:
            answer = await self.send("POST", route, content, **ADMIN)
            assert answer.status == 200, answer
        self.became["updates"] += 1

    def request(self) -> dict[str, Any]:
        rng = self.rng
        prompt = rng.choice(self._texts)[: rng.randint(1, LONGEST - 20)]
        if rng.random() < 0.3:
            prompt = random_prompt(rng, rng.randint(1, LONGEST - 20))
        params = {
            "temperature": rng.choice([0, 0.7, 1.0]),
            "top_p": rng.choice([1.0, 1.0, 0.9]),
            "top_k": rng.choice([-1, 0, 20]),
            "min_p": rng.choice([0.0, 0.0, 0.02]),
            "max_tokens": rng.choice([1, 4, 12, 20]),
            "seed": rng.choice([None, None, 7]),
            "stop": rng.choice([[], [], ["e", "xyz"]]),
            "ignore_eos": True,
            "logprobs": rng.choice([0, 0, 3]),
            "prompt_logprobs": rng.choice([None, None, None, 0]),
        }
        return {
            "token_ids": prompt,
            "sampling_params": params,
            "urgent": rng.random() < 0.1,
            "cache_salt": rng.choice([None, None, "salt"]),
        }

    def keep(self, body: dict[str, Any], response: GenerateResponse) -> None:
        [choice] = response.choices
        params = body["sampling_params"]
        assert 1 <= len(choice.token_ids) <= params["max_tokens"]
        assert choice.logprobs is not None and choice.weight_versions is not None
        assert [entry.token_id for entry in choice.logprobs.content] == choice.token_ids
        assert choice.weight_versions[-1].end == len(choice.token_ids)
        if params["temperature"] == 0 or self.rng.random() < CHECKED:
            self.kept.append(Kept(body["token_ids"], params["temperature"], response))

    async def ask_alike(self) -> str:
        body = self.request()
        body["sampling_params"] |= {"temperature": 0, "stop": []}
        await asyncio.gather(*[self.retry(partial(self.generate, body)) for _ in range(ALIKE)])
        return "asked alike"

    async def generate(self, body: dict[str, Any] | None = None) -> str:
        body = body or self.request()
        answer = await self.send("POST", GENERATE, body)
        assert answer.status == 200, answer
        self.keep(body, msgspec.json.decode(answer.content, type=GenerateResponse))
        return "answered"

    async def stream(self) -> str:
        body = self.request()
        choices, last = [], {}
        async for last in self.events(body):
            choices += last["choices"]
        tokens = [token for choice in choices for token in choice["token_ids"]]
        logprobs = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        whole = {**last, "choices": [{**choices[-1], "token_ids": tokens, "logprobs": {"content": logprobs}}]}
        self.keep(body, msgspec.convert(whole, GenerateResponse, strict=False))
        return "streamed"

    async def hang_up(self) -> str:
        asking = asyncio.create_task(self.send("POST", GENERATE, self.request()))
        await asyncio.wait([asking], timeout=self.rng.uniform(0, 0.1))
        asking.cancel()
        await asyncio.wait([asking])
        return "hung up"

    async def leave_a_stream(self) -> str:
        async with contextlib.aclosing(self.events(self.request())) as events:  # type: ignore[type-var]
            for _ in range(self.rng.randint(1, 3)):
                await anext(events, None)
        return "left a stream"

    async def ask_nonsense(self) -> str:
        method, route, body = self.rng.choice(BAD)
        answer = await self.send(method, route, body)
        assert 400 <= answer.status < 500, (route, body, answer)
        assert json.loads(answer.content)["error"]["message"]
        return "refused"

    async def converse(self) -> str:
        messages = [{"role": "user", "content": "hello" * self.rng.randint(0, 5)}]
        body = {"messages": messages, "max_tokens": 6, "n": self.rng.randint(1, 3), "logprobs": True}
        answer = await self.send("POST", "/v1/chat/completions", body)
        assert answer.status == 200, answer
        assert len(json.loads(answer.content)["choices"]) == body["n"]
        return "conversed"

    async def complete(self) -> str:
        body = {"prompt": ["once upon", "a time"], "max_tokens": 5, "stop": "e"}
        answer = await self.send("POST", "/v1/completions", body)
        assert answer.status == 200, answer
        assert len(json.loads(answer.content)["choices"]) == 2
        return "completed"


class Counted(EmbeddedBackend):
    """Remembers what it accepted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.accepted: list[EmbeddedGeneration] = []

    def submit(self, *args: Any, **kwargs: Any) -> EmbeddedGeneration:
        generation = super().submit(*args, **kwargs)
        self.accepted.append(generation)
        return generation


def check_logprobs(kept: list[Kept], models: dict[str, Any]) -> None:
    for prompt, temperature, response in kept:
        [choice] = response.choices
        assert choice.logprobs is not None
        tokens = [*prompt, *choice.token_ids]
        sampled = [entry.logprob for entry in choice.logprobs.content]
        for span in choice.weight_versions or ():
            plain = plain_logprobs(models[span.version], tokens, temperature)
            assert_close(sampled[span.start : span.end], plain[len(prompt) - 1 :][span.start : span.end])
            if span.start == 0 and response.prompt_logprobs is not None:
                scores = zip(prompt[1:], response.prompt_logprobs[1:], strict=True)
                assert_close([table[token].logprob for token, table in scores if table], plain[: len(prompt) - 1])


async def soak(
    count: int,
    updates: int,
    model_directory: Path,
    make_model: Callable[[int], Any],
    publish: Callable[[Any, Version], Path],
    kv_on_update: Literal["recompute", "keep"] = "recompute",
) -> Soak:
    models = {version: make_model(version.step) for version in VERSIONS}
    directories = {version: publish(model, version) for version, model in models.items()}
    chat = chat_of(model_directory)
    engine = Engine(
        make_model(0),
        max_model_len=LONGEST,
        max_running=12,
        max_step_tokens=96,
        kv_blocks=22,
        kv_on_update=kv_on_update,
        decode=chat.tokenizer.decode,
    )
    backend: Counted = await connect(engine, max_waiting=8, kind=Counted)
    async with served(backend, chat) as url:
        ran = Soak(url, random.Random(0), directories)
        await ran.run(count, updates)
        while any(not generation._ended.done() for generation in backend.accepted):
            await asyncio.sleep(0.01)  # those whose clients have gone
        await backend.pause()
        await ran.http.close()
        assert_nothing_left(engine)
        state = backend.state()
    assert sum(state.finished.values()) == len(backend.accepted)
    assert set(state.finished) <= {"stop", "length", "cancelled"}
    assert all(generation._ended.done() for generation in backend.accepted)
    assert min(state.preemptions, state.tokens_cached, state.finished["cancelled"]) > 0
    assert ran.became.total() - ran.became["updates"] - ran.became["turned away"] == count
    if kv_on_update == "keep":
        ran.kept = [kept for kept in ran.kept if len(kept.response.choices[0].weight_versions or ()) == 1]
    check_logprobs(ran.kept, {str(version): model for version, model in models.items()})
    return ran


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "CHUNK_TOKENS", 32)
    monkeypatch.setattr(window_module, "MIN_ROW_TOKENS", 32)


@pytest.mark.parametrize("kv_on_update", ["recompute", pytest.param("keep", marks=pytest.mark.full)])
async def test_hundreds_of_requests_with_everything_that_can_happen_to_them(
    model_directory: Path,
    make_model: Callable[[int], Any],
    publish: Callable[[Any, Version], Path],
    monkeypatch: pytest.MonkeyPatch,
    kv_on_update: Literal["recompute", "keep"],
) -> None:
    monkeypatch.setattr("tests.inference.test_engine_soak.CHECKED", 0.1)
    ran = await soak(120, 6, model_directory, make_model, publish, kv_on_update)
    assert len(ran.kept) > 30
    assert [kind for kind in OFTEN if not ran.became[kind]] == []


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
async def test_ten_thousand_requests_with_everything_that_can_happen_to_them(
    model_directory: Path,
    make_model: Callable[[int], Any],
    publish: Callable[[Any, Version], Path],
    kv_on_update: Literal["recompute", "keep"],
) -> None:
    ran = await soak(10_000, 100, model_directory, make_model, publish, kv_on_update)
    assert len(ran.kept) > 2000
    assert [kind for kind in KINDS if not ran.became[kind]] == []
