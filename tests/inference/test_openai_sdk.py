"""OpenAI's own Python client against the server, as it is."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from headrace.inference.embedded.backend import EmbeddedBackend
from headrace.inference.embedded.loading import load_model
from headrace.inference.keys import Keys
from headrace.inference.schema import SamplingParams
from headrace.text.tokenizer import Tokenizer
from tests.inference.serving import backend_of, chat_of, served

HELLO: Any = [{"role": "user", "content": "hello"}]
ADD: Any = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


@pytest_asyncio.fixture
async def backend(model: Any, model_directory: Path) -> EmbeddedBackend:
    return await backend_of(model, model_directory, max_running=4, max_waiting=4)


@pytest_asyncio.fixture
async def client(backend: EmbeddedBackend, model_directory: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        served(backend, chat_of(model_directory), Keys(("secret",), ("admin",))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield client


async def test_a_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=HELLO, max_completion_tokens=6, n=2, seed=1, logprobs=True, top_logprobs=3
    )
    assert [choice.message.role for choice in answer.choices] == ["assistant"] * 2
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)
    for entry in answer.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= entry.top_logprobs[0].logprob + 1e-6  # summed in another order
        assert bytes(entry.bytes).decode(errors="replace") == entry.token


async def test_a_streamed_chat_is_the_same_chat_for_every_choice(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "n": 3, "seed": 5}
    whole = await client.chat.completions.create(**asked)
    texts, reasons = [""] * 3, [""] * 3
    order = []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        order.append(choice.index)
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert order != sorted(order)  # side by side


async def test_tools_reach_the_model(tiny_model: Path) -> None:
    backend = await backend_of(load_model(tiny_model, "float32"), tiny_model, max_model_len=512, eos_token_ids=())
    async with (
        served(backend, chat_of(tiny_model)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        answer = await client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            tools=[ADD],
            max_tokens=1,
            tool_choice="auto",
            extra_body={"return_token_ids": True},
        )
        assert answer.model_extra is not None
        assert '"name": "add"' in Tokenizer(tiny_model).decode(answer.model_extra["prompt_token_ids"])
        assert len(answer.choices[0].model_extra["token_ids"]) == 1


async def test_a_stop_string_ends_the_reply_and_is_no_part_of_it(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 60, "seed": 2, "extra_body": {"ignore_eos": True}}
    free = (await client.chat.completions.create(**asked)).choices[0].message.content
    stop = free[len(free) // 2 :][:3]
    [choice] = (await client.chat.completions.create(**asked, stop=stop)).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == free.partition(stop)[0].strip()
    streamed = [chunk async for chunk in await client.chat.completions.create(**asked, stop=[stop], stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == choice.message.content


async def test_completions(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 8, "n": 2, "seed": 3}
    answer = await client.completions.create(**asked, logprobs=2, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in answer.choices] == ["one", "one", "two", "two"]
    for choice in answer.choices:
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs) >= 3 + 1
    whole = await client.completions.create(**asked)
    texts = [""] * 4
    async for chunk in await client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "headrace"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        await client.models.retrieve("gpt-9")


async def test_errors_map_to_the_clients_exceptions(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        await client.chat.completions.create(model="gpt-9", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()


@pytest.mark.timeout(10)
async def test_a_full_server_is_asked_again(client: openai.AsyncOpenAI, backend: EmbeddedBackend) -> None:
    await backend.pause()
    waiting = [backend.submit([5], SamplingParams(max_tokens=1)) for _ in range(8)]
    with pytest.raises(openai.RateLimitError) as refused:
        await client.completions.create(model="tiny", prompt="a", max_tokens=1)
    assert refused.value.response.headers["retry-after"] == "1"
    asked = client.with_options(max_retries=3).completions.create(model="tiny", prompt="a", max_tokens=1)
    patient = asyncio.create_task(asked)
    await asyncio.sleep(0.1)  # it is refused once, or comes late and is not
    await backend.resume()
    assert (await patient).usage.completion_tokens == 1
    await asyncio.gather(*[each.result() for each in waiting])


async def test_the_end_of_the_engine_is_reported_in_the_stream(model: Any, model_directory: Path) -> None:
    backend = await backend_of(model, model_directory, max_model_len=4096)
    async with (
        served(backend, chat_of(model_directory)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await backend.close()
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass


async def test_the_client_without_an_event_loop(client: openai.AsyncOpenAI) -> None:
    plain = openai.OpenAI(base_url=str(client.base_url), api_key="secret")

    def talk() -> str:
        stream = plain.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, stream=True, seed=0)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, seed=0)
    assert await asyncio.to_thread(talk) == answer.choices[0].message.content


async def test_structured_chats_are_json_whole_and_streamed_and_name_their_logprobs(client: openai.AsyncOpenAI) -> None:
    schema = {"type": "array", "items": {"enum": ["<think>", "b"]}, "minItems": 2, "maxItems": 2}
    asked: Any = {
        "model": "tiny",
        "messages": HELLO,
        "seed": 2,
        "temperature": 1.5,
        "logprobs": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": schema, "strict": True}},
    }
    whole = (await client.chat.completions.create(**asked)).choices[0]
    assert whole.finish_reason == "stop" and len(json.loads(whole.message.content or "")) == 2
    assert whole.model_extra is not None and whole.model_extra["logprobs_mode"] == "processed_logprobs"
    chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**asked, stream=True)]
    assert "".join(choice.delta.content or "" for choice in chunks) == whole.message.content
    assert chunks[-1].model_extra is not None and chunks[-1].model_extra["logprobs_mode"] == "processed_logprobs"
    chosen = await client.chat.completions.create(
        model="tiny", messages=HELLO, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert chosen.choices[0].message.content in ("yes", "no")
    with pytest.raises(openai.BadRequestError, match="tools"):
        await client.chat.completions.create(**asked, tools=[ADD])
