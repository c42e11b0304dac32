"""A frozen model's scores: through every route, against servers that misbehave, and against the server that ships."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from headrace.errors import BadInput
from headrace.inference.client import served_model
from headrace.inference.client.reference import FrozenModel, Reference, ReferenceFailed
from headrace.inference.client.served_model import ServedModel
from headrace.inference.embedded.engine import Engine
from headrace.inference.schema import SamplingParams
from headrace.orchestrator.sampler import FrozenSampler
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from tests.inference.openai_stand_in import error
from tests.inference.serving import client_of_engine
from tests.refusals import refused

GENERATE, PROMPT_LOGPROBS, ECHO = "generate", "prompt_logprobs", "echo"
IDS = [5, 9, 2, 12]
Answer = Callable[[web.Request, dict[str, Any]], web.Response | None]


def logprob(token: int, temperature: float = 1.0) -> float:
    return -(1 + token % 5) / 4 / temperature


def scores_of(ids: list[int], temperature: float = 1.0) -> list[float]:
    return [0.0, *(logprob(token, temperature) for token in ids[1:])]


class Teacher:
    """A server with some of the routes. `answer` may answer a request instead; `asked` has the bodies by path."""

    def __init__(self, *routes: str, tokenizer: Tokenizer | None = None) -> None:
        self.routes = routes
        self.tokenizer = tokenizer
        self.entries: list[dict[str, Any]] | None = [{"id": "teacher", "max_model_len": 101}]
        self.vocabulary = 259
        self.heeds_temperature = True
        self.logprob = logprob
        self.answer: Answer = lambda request, body: None
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []

    async def __aenter__(self) -> Teacher:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.root = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def model(self, **options: Any) -> FrozenModel:
        return FrozenModel(ServedModel("teacher", [f"{self.root}/v1"], **{"timeout": 5, "retry_for": 0, **options}))

    def count(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.asked)

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        self.asked.append((request.path, body))
        self.headers.append(dict(request.headers))
        return self.answer(request, body) or self._served(request.path, body) or error(404, "no such route")

    def _served(self, path: str, body: dict[str, Any]) -> web.Response | None:
        if path == "/v1/models" and self.entries is not None:
            return web.json_response({"object": "list", "data": self.entries})
        if path == "/tokenize" and self.tokenizer is not None:
            return web.json_response({"tokens": self.tokenizer.encode(body["prompt"])})
        if path == "/inference/v1/generate" and GENERATE in self.routes:
            temperature = body["sampling_params"]["temperature"]
            return self._scored(body["token_ids"], temperature, lambda known: {"prompt_logprobs": known})
        if path == "/v1/completions" and PROMPT_LOGPROBS in self.routes and "prompt_logprobs" in body:
            wrap = lambda known: {"choices": [{"text": "x", "prompt_logprobs": known}]}  # noqa: E731
            return self._scored(body["prompt"], body["temperature"], wrap)
        if path == "/v1/completions" and ECHO in self.routes:
            return self._echoed(body)
        return None

    def _scored(self, ids: list[int], temperature: float, wrap: Callable[[Any], dict[str, Any]]) -> web.Response:
        """In vLLM's form: with a likelier token beside each."""
        if max(ids) >= self.vocabulary:
            return error(400, f"Token id {max(ids)} is out of vocabulary")
        tempered = temperature if self.heeds_temperature else 1.0
        known = [
            {token: {"logprob": self.logprob(token, tempered), "rank": 2}, 999: {"logprob": -0.1}} for token in ids
        ]
        return web.json_response(wrap([None, *known[1:]]))

    def _echoed(self, body: dict[str, Any]) -> web.Response:
        logprobs = None
        if body.get("echo"):
            known = [self.logprob(token, body["temperature"]) for token in body["prompt"][1:]]
            logprobs = {"tokens": ["?"] * (len(known) + 2), "token_logprobs": [None, *known, -0.5]}
        return web.json_response({"choices": [{"text": "x", "logprobs": logprobs}]})


@pytest.fixture
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer(model_directory)


@pytest.fixture
async def teacher(tokenizer: Tokenizer) -> AsyncIterator[Teacher]:
    async with Teacher(GENERATE, tokenizer=tokenizer) as teacher:
        yield teacher


async def refusal(teacher: Teacher, tokenizer: Tokenizer, seq_len: int = 100, **options: Any) -> str:
    """Why the check fails."""
    model = teacher.model(**options)
    with pytest.raises(BadInput) as raised:
        await model.check(tokenizer, seq_len)
    await model.close()
    return str(raised.value)


async def failure(teacher: Teacher, **options: Any) -> str:
    """Why there are no scores."""
    model = teacher.model(**options)
    with pytest.raises(ReferenceFailed) as failed:
        await model.score(IDS, 1.0)
    await model.close()
    assert str(failed.value).startswith(f"teacher at {teacher.root}/v1 did not score a sequence of 4 tokens: ")
    return str(failed.value)


# Scores


async def test_the_server_that_ships_scores_as_its_engine_does_token_by_token(model: Any, model_directory: Path):
    engine = Engine(model, max_model_len=64, max_running=2, eos_token_ids=[258], seed=0)
    async with client_of_engine(engine, model_directory) as engines:
        [url] = await engines.health_by_url()
        frozen: Reference = FrozenModel(ServedModel("tiny", [f"{url}/v1"]))
        await frozen.check(Tokenizer(model_directory), 63)
        ids = [*range(40, 70), 258, 7]
        for temperature in (1.0, 0.7):
            scores = await frozen.score(ids, temperature)
            assert scores.tolist() == (await engines.score(ids, temperature)).logprobs
        assert (await frozen.score([5], 1.0)).tolist() == [0.0]
        first = await frozen.generate(ids, 6, 0.7, seed=1)
        same = SamplingParams(max_tokens=6, temperature=0.7, seed=1)
        assert first.token_ids == (await engines.generate(ids, same)).token_ids
        stopped = await frozen.generate(ids, 6, 0.7, seed=1, stop_token_ids=first.token_ids[:1])
        assert (stopped.token_ids, stopped.finish_reason) == (first.token_ids[:1], "stop")
        with pytest.raises(ReferenceFailed, match=r"token_ids.*264"):
            await frozen.generate([5, 264], 6)
        with pytest.raises(ReferenceFailed, match=r"token_ids.*264"):
            await frozen.score([5, 264], 1.0)
        with refused(key="seq_len", value=64):
            await frozen.check(Tokenizer(model_directory), 64)
        await frozen.close()


async def test_text_of_a_server_without_token_ids_is_encoded(tokenizer: Tokenizer):
    async with Teacher(ECHO) as teacher:
        model = teacher.model()
        await model.check(tokenizer, 100)
        assert (await model.generate(IDS, 6, seed=3)).token_ids == tokenizer.encode("x")
        path, body = teacher.asked[-1]
        assert path == "/v1/completions"
        assert body == {"model": "teacher", "prompt": IDS, "max_tokens": 6, "temperature": 1.0, "seed": 3}
        teacher.answer = lambda request, body: web.json_response({"choices": []})
        with pytest.raises(ReferenceFailed, match="has no choices"):
            await model.generate(IDS, 6)
        await model.close()


async def test_the_server_that_ships_plays_as_a_teacher(model: Any, model_directory: Path):
    engine = Engine(model, max_model_len=64, max_running=2, eos_token_ids=[258], seed=0)
    tokenizer = Tokenizer(model_directory)
    renderer = make_renderer(model_directory, tokenizer)
    async with client_of_engine(engine, model_directory) as engines:
        [url] = await engines.health_by_url()
        teacher = ServedModel("tiny", [f"{url}/v1"])
        await teacher.check()
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_tokens": 6, "seed": 1}
        sampler = FrozenSampler(teacher, renderer, tokenizer, 60, **sampling)
        messages = [{"role": "user", "content": "hi"}]
        first, again = [await sampler.open("session", "episode").chat(messages) for _ in range(2)]
        assert first.message == again.message  # the same seed
        assert first.turn.completion_ids.tolist() == tokenizer.encode(first.message["content"])
        assert (first.truncated, first.turn.prompt_ids.tolist()) == (
            True,
            tokenizer.apply_chat_template(messages, add_generation_prompt=True),
        )
        await teacher.close()


@pytest.mark.parametrize("route", [GENERATE, PROMPT_LOGPROBS, ECHO])
async def test_each_route_gives_the_scores_of_the_tokens_themselves(tokenizer: Tokenizer, route: str):
    async with Teacher(route, tokenizer=tokenizer) as teacher:
        model = teacher.model()
        await model.check(tokenizer, 100)
        teacher.asked.clear()
        assert (await model.score(np.array(IDS, np.int32), 0.5)).tolist() == scores_of(IDS, 0.5)
        sampling = {"max_tokens": 1, "temperature": 0.5, "seed": 0}
        bodies = {
            GENERATE: {"token_ids": IDS, "sampling_params": {**sampling, "prompt_logprobs": 0}},
            PROMPT_LOGPROBS: {"prompt": IDS, **sampling, "prompt_logprobs": 0},
            ECHO: {"prompt": IDS, **sampling, "echo": True, "logprobs": 1},
        }
        path = "/inference/v1/generate" if route == GENERATE else "/v1/completions"
        assert teacher.asked == [(path, {"model": "teacher", **bodies[route]})]
        await model.close()


async def test_several_addresses_share_the_work_and_one_that_fails_rests(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(served_model, "COOLDOWN_S", 600.0)
    async with Teacher(GENERATE) as first, Teacher(ECHO) as second:
        urls = [f"{first.root}/v1", f"{second.root}/v1"]
        model = FrozenModel(ServedModel("teacher", urls, timeout=5, retry_for=5))
        await model.check(tokenizer, 100)
        first.asked.clear()
        second.asked.clear()
        results = await asyncio.gather(*(model.score(IDS, 1.0) for _ in range(8)))
        assert [len(first.asked), len(second.asked)] == [4, 4]
        first.answer = lambda request, body: error(503, "restarting")
        results += [await model.score(IDS, 1.0) for _ in range(4)]
        assert [len(first.asked), len(second.asked)] == [5, 8]
        assert all(scores.tolist() == scores_of(IDS) for scores in results)
        await model.close()


async def test_a_key_and_headers_go_along_and_the_key_is_never_shown(
    teacher: Teacher, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    def wants_key(request: web.Request, body: dict[str, Any]) -> web.Response | None:
        given = request.headers.get("Authorization")
        return None if given == "Bearer hunter2" else error(401, f"not a key: {given}")

    teacher.answer = wants_key
    options: dict[str, Any] = {"api_key_var": "TEACHER_KEY", "headers": {"X-Team": "mill"}}
    assert "the environment variable TEACHER_KEY, for the key, is not set" in await refusal(
        teacher, tokenizer, **options
    )
    monkeypatch.setenv("TEACHER_KEY", "hunter3")
    for words in (await refusal(teacher, tokenizer, **options), await failure(teacher, **options)):
        assert "not a key" in words
        assert "hunter" not in words
    monkeypatch.setenv("TEACHER_KEY", "hunter2")
    model = teacher.model(**options)
    await model.check(tokenizer, 100)
    assert (await model.score(IDS, 1.0)).tolist() == scores_of(IDS)
    assert teacher.headers[-1]["X-Team"] == "mill"
    await model.close()


# What goes wrong in the middle of a run


async def test_what_fails_for_a_passing_reason_is_asked_again(teacher: Teacher):
    failures = iter([error(500, "oops"), error(429, "busy", Retry_After="0.01"), error(408, "slow")])
    teacher.answer = lambda request, body: next(failures, None)
    model = teacher.model(retry_for=5)
    assert (await model.score(IDS, 1.0)).tolist() == scores_of(IDS)
    assert len(teacher.asked) == 4
    await model.close()


async def test_a_persistent_failure_names_model_address_and_reason(teacher: Teacher):
    teacher.answer = lambda request, body: error(500, "out of memory")
    assert "out of memory (HTTP 500 from" in await failure(teacher, retry_for=0.5)
    assert len(teacher.asked) > 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening
        teacher.root = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert "cannot be reached" in await failure(teacher, retry_for=0.2)


async def test_a_refusal_and_a_timeout_are_not_tried_again(teacher: Teacher):
    teacher.answer = lambda request, body: error(400, "too long")
    assert "too long (HTTP 400 from" in await failure(teacher, retry_for=60)
    assert len(teacher.asked) == 1
    with socket.create_server(("127.0.0.1", 0)) as silent:
        teacher.root = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "did not answer within 0.1 s" in await failure(teacher, timeout=0.1, retry_for=60)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, None, -9999.0])
async def test_a_score_that_is_not_finite_is_a_failure(teacher: Teacher, value: float):
    teacher.logprob = lambda token, temperature=1.0: value if token == 2 else -1.0
    assert "not finite" in await failure(teacher, retry_for=60)
    assert len(teacher.asked) == 1


async def test_a_score_above_zero_is_a_failure_but_for_rounding(teacher: Teacher):
    teacher.logprob = lambda token, temperature=1.0: 0.5 if token == 2 else -1.0
    words = await failure(teacher, retry_for=60)
    assert "(0.5) for token 2 at position 2" in words and "/inference/v1/generate" in words
    assert len(teacher.asked) == 1
    teacher.logprob = lambda token, temperature=1.0: 0.0005
    model = teacher.model()
    assert (await model.score(IDS, 1.0)).tolist() == [0.0, *[0.0005] * 3]
    await model.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"prompt_logprobs": [None, {"9": {"logprob": -1.0}}]}, "2 logprobs for 4 tokens"),
        ({"prompt_logprobs": [None, *[{"3": {"logprob": -1.0}}] * 3]}, "token 9 at position 1"),
        ({"prompt_logprobs": None}, "no logprobs"),
        ({"prompt_logprobs": 3}, "got `int`"),
    ],
)
async def test_scores_that_are_not_those_of_the_tokens_are_a_failure(teacher: Teacher, answer: Any, words: str):
    teacher.answer = lambda request, body: web.json_response(answer)
    assert words in await failure(teacher)


# What is checked before a run begins


async def test_a_server_that_reports_everything_is_checked_without_warnings(
    teacher: Teacher, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    model = teacher.model()
    await model.check(tokenizer, 100)
    assert caplog.messages == []
    assert teacher.count("/tokenize") == 4
    assert teacher.count("/inference/v1/generate") == 2
    assert teacher.asked[-1][1]["token_ids"][-1] == 258  # the highest id
    await model.close()


async def test_unreported_facts_are_logged_in_one_line(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture):
    async with Teacher(GENERATE) as teacher:
        teacher.entries = None
        model = teacher.model()
        await model.check(tokenizer, 100)
        [message] = caplog.messages
        assert "max_model_len" in message and "/tokenize" in message
        await model.close()


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_a_route_that_a_server_does_not_have_is_no_reason_to_refuse_it(
    teacher: Teacher, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, status: int
):
    unknown = ("/tokenize", "/health", "/inference/v1/generate")
    teacher.routes = (ECHO,)
    teacher.answer = lambda request, body: error(status, "not here") if request.path in unknown else None
    model = teacher.model(retry_for=60)
    await model.check(tokenizer, 100)
    assert "/tokenize" in caplog.messages[0]
    assert teacher.count("/inference/v1/generate") == 1  # and then through another route
    await model.close()


@pytest.mark.parametrize("route", ["/tokenize", "/health"])
async def test_a_temporary_failure_of_the_vocabulary_check_is_retried(
    teacher: Teacher, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, route: str
):
    failures = iter([error(429, "busy"), error(500, "oops")])
    teacher.answer = lambda request, body: next(failures, None) if request.path == route else None
    model = teacher.model(retry_for=5)
    await model.check(tokenizer, 100)
    assert caplog.messages == []
    assert teacher.count("/tokenize") == (6 if route == "/tokenize" else 4)
    await model.close()


@pytest.mark.parametrize("route", ["/tokenize", "/health"])
@pytest.mark.parametrize("status", [401, 429, 500])
async def test_a_vocabulary_that_a_server_keeps_to_itself_is_refused(
    teacher: Teacher, tokenizer: Tokenizer, route: str, status: int
):
    teacher.answer = lambda request, body: error(status, "not now") if request.path == route else None
    words = await refusal(teacher, tokenizer)
    assert f"not now (HTTP {status} from {teacher.root}{route})" in words


async def test_a_health_reply_of_another_shape_is_ignored(
    teacher: Teacher, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    teacher.answer = lambda request, body: web.Response() if request.path == "/health" else None
    model = teacher.model()
    await model.check(tokenizer, 100)
    assert caplog.messages == []
    await model.close()


async def test_an_unreachable_server_is_logged_at_once_and_refused_in_time(
    teacher: Teacher, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        teacher.root = f"http://127.0.0.1:{taken.getsockname()[1]}"
        words = await refusal(teacher, tokenizer, retry_for=0.2)
    assert "teacher" in words and f"{teacher.root}/v1/models cannot be reached" in words
    assert "0.2 s" in caplog.messages[0]


async def test_a_server_that_comes_late_is_waited_for(
    teacher: Teacher, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    failures = iter([error(503, "loading"), error(503, "loading")])
    teacher.answer = lambda request, body: next(failures, None)
    model = teacher.model(retry_for=5)
    await model.check(tokenizer, 100)
    assert len(caplog.messages) == 1
    await model.close()


async def test_a_server_that_hangs_is_refused(teacher: Teacher, tokenizer: Tokenizer):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        teacher.root = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "did not answer within 0.1 s" in await refusal(teacher, tokenizer, timeout=0.1, retry_for=60)


async def test_a_model_that_is_not_served_is_refused_with_those_that_are(teacher: Teacher, tokenizer: Tokenizer):
    teacher.entries = [{"id": "big"}, {"id": "models/teacher"}]
    words = await refusal(teacher, tokenizer)
    assert f"{teacher.root}/v1" in words and "big, models/teacher" in words
    teacher.entries = [{"id": "models/teacher", "owned_by": "headrace"}]  # it takes the last part, too
    model = teacher.model()
    await model.check(tokenizer, 100)
    await model.close()


async def test_a_context_that_is_too_short_is_refused_with_both_numbers(teacher: Teacher, tokenizer: Tokenizer):
    teacher.entries = [{"id": "teacher", "max_model_len": 100}]
    words = await refusal(teacher, tokenizer)
    assert "max_model_len = 100" in words and "seq_len = 100" in words


async def test_the_smallest_max_model_len_is_returned(teacher: Teacher, tokenizer: Tokenizer):
    async with Teacher(GENERATE, tokenizer=tokenizer) as other:
        other.entries = [{"id": "teacher", "max_model_len": 300}]
        urls = [f"{other.root}/v1", f"{teacher.root}/v1"]
        model = FrozenModel(ServedModel("teacher", urls, timeout=5, retry_for=0))
        assert await model.check(tokenizer, 100) == 101
        teacher.entries = None
        assert await model.check(tokenizer, 100) == 300
        other.entries = [{"id": "teacher"}]
        assert await model.check(tokenizer, 100) is None
        await model.close()


async def test_a_server_without_scores_is_refused_with_what_to_serve_it_with(tokenizer: Tokenizer):
    async with Teacher() as teacher:
        words = await refusal(teacher, tokenizer)
        assert "headrace serve" in words
        teacher.answer = lambda request, body: (
            web.json_response({"choices": [{"text": "x"}]}) if request.path == "/v1/completions" else None
        )
        assert "no logprobs through /completions with echo" in await refusal(teacher, tokenizer)


async def test_a_smaller_vocabulary_is_refused(teacher: Teacher, tokenizer: Tokenizer):
    teacher.vocabulary = 258
    words = await refusal(teacher, tokenizer)
    assert "has another vocabulary than the policy: it does not score the policy's highest token id, 258" in words
    assert "Token id 258 is out of vocabulary" in words
    teacher.vocabulary = 259
    teacher.answer = lambda request, body: web.json_response({"vocab_size": 258}) if request.path == "/health" else None
    assert "it has 258 tokens, and the policy has 259" in await refusal(teacher, tokenizer)


async def test_another_tokenizer_of_the_same_size_is_refused_with_the_text(teacher: Teacher, tokenizer: Tokenizer):
    def tokenize(request: web.Request, body: dict[str, Any]) -> web.Response | None:
        if request.path != "/tokenize":
            return None
        ids = tokenizer.encode(body["prompt"])
        return web.json_response({"tokens": ids if body["prompt"].isascii() else [*ids, 0]})

    teacher.answer = tokenize
    words = await refusal(teacher, tokenizer)
    assert "'Größe, naïveté" in words and "tokenizer" in words


async def test_a_server_that_heeds_no_temperature_is_only_asked_at_one(
    teacher: Teacher, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "headrace.inference.client.reference")
    teacher.heeds_temperature = False
    model = teacher.model()
    for _ in range(2):
        await model.check(tokenizer, 100)
    assert len(caplog.messages) == 2 and all("temperature 1" in message for message in caplog.messages)
    assert (await model.score(IDS, 1.0)).tolist() == scores_of(IDS)
    with pytest.raises(ReferenceFailed, match=r"temperature 1 .*0\.7"):
        await model.score(IDS, 0.7)
    await model.close()


async def test_a_server_that_heeds_no_temperature_is_refused_where_another_is_sampled_at(
    teacher: Teacher, tokenizer: Tokenizer
):
    model = teacher.model()
    await model.check(tokenizer, 100, 0.7)
    teacher.heeds_temperature = False
    with refused(key="sampling.temperature", value=0.7):
        await model.check(tokenizer, 100, 0.7)
    await model.close()


@pytest.mark.parametrize("urls", [[], ["localhost:8000/v1"]])
def test_a_model_without_an_address_is_refused(urls: list[str]):
    with refused(key="base_url"):
        FrozenModel(ServedModel("teacher", urls))
