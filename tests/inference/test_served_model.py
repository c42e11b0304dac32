"""A served model at several addresses: who is asked when one does not answer in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from headrace.errors import BadInput
from headrace.inference.client import served_model
from headrace.inference.client.openai_client import OpenAITimeout
from headrace.inference.client.served_model import HELLO, ServedModel
from tests.inference.openai_stand_in import OpenAIStandIn, error


@asynccontextmanager
async def served(*servers: OpenAIStandIn, **options: Any) -> AsyncIterator[ServedModel]:
    urls = [server.url for server in servers]
    model = ServedModel("large", urls, **{"timeout": 1.0, "retry_for": 5, **options})
    yield model
    await model.close()


async def say(model: ServedModel) -> str:
    return (await model.call(lambda client: client.chat(HELLO))).text


async def test_what_one_address_does_not_answer_in_time_is_asked_of_another_and_it_rests_for_that_time(
    monkeypatch: pytest.MonkeyPatch,
):
    now = 0.0
    monkeypatch.setattr(served_model, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(served_model, "COOLDOWN_S", 0.05)
    late, good = OpenAIStandIn(lambda _: "late"), OpenAIStandIn(lambda _: "yes")
    async with late, good, served(late, good) as model:
        late.hold = asyncio.Event()
        assert await say(model) == "yes"
        late.hold.set()
        now = 0.8
        assert await say(model) == "yes"
        assert [len(late.asked), len(good.asked)] == [1, 2]
        now = 1.2
        assert await say(model) == "late"


async def test_what_no_address_answers_in_time_is_given_up():
    async with OpenAIStandIn() as one, OpenAIStandIn() as two, served(one, two) as model:
        one.hold = two.hold = asyncio.Event()
        with pytest.raises(OpenAITimeout):
            await say(model)
        assert [len(one.asked), len(two.asked)] == [1, 1]


async def test_a_chat_of_one_token_is_asked_of_every_address():
    async with OpenAIStandIn() as one, OpenAIStandIn() as two, served(one, two) as model:
        await model.check_chat({"temperature": 0.5, "top_k": 20}, 100)
        body = {"model": "large", "messages": HELLO, "max_tokens": 1, "temperature": 0.5, "top_k": 20}
        assert one.asked == two.asked == [body]


async def test_a_refused_chat_is_quoted():
    async with OpenAIStandIn() as one, OpenAIStandIn() as two, served(one, two) as model:
        two.respond = lambda asked: error(400, "the tokenizer has no chat template")
        with pytest.raises(BadInput) as refused:
            await model.check_chat({"temperature": 0.5}, 100)
        for part in (f"large at {two.url}", "temperature = 0.5", "no chat template", "HTTP 400"):
            assert part in str(refused.value)


async def test_an_address_that_is_busy_when_it_is_checked_is_asked_again():
    answers = iter([error(503, "loading"), web.json_response({"choices": [{"message": {"content": None}}]})])
    async with OpenAIStandIn(lambda _: next(answers)) as server, served(server) as model:
        await model.check_chat({}, 100)
        assert len(server.asked) == 2


@pytest.mark.parametrize(("seq_len", "warns"), [(100, False), (101, True)])
async def test_a_max_model_len_below_seq_len_is_logged(caplog: pytest.LogCaptureFixture, seq_len: int, warns: bool):
    caplog.set_level(logging.WARNING)
    async with OpenAIStandIn() as server, served(server) as model:
        server.entries = [{"id": "large", "max_model_len": 100}]
        await model.check_chat({}, seq_len)
        assert len(caplog.messages) == int(warns)
        assert not warns or ("max_model_len = 100" in caplog.text and "seq_len = 101" in caplog.text)
