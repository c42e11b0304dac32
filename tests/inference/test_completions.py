"""`/v1/completions`: prompts of every form, echoes and scores, and the routes that our own client asks for scores."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch

from headrace.inference.backend import GenerationResult, TokenChunk
from headrace.inference.client.openai_client import OpenAIClient
from headrace.inference.client.reference import ScoreRoute, prompt_scores
from headrace.inference.server import completions
from headrace.inference.server.completions import CompletionRequest
from headrace.inference.server.request_bodies import StreamOptions
from headrace.text.tokenizer import Tokenizer
from tests.inference.plain_forward import plain_logprobs
from tests.inference.serving import backend_of, chat_of, served

PATH = "/v1/completions"


@pytest_asyncio.fixture
async def url(model: Any, model_directory: Path) -> AsyncIterator[str]:
    async with served(await backend_of(model, model_directory), chat_of(model_directory)) as url:
        yield url


@pytest.fixture
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer(model_directory)


async def complete(url: str, **body: Any) -> Any:
    async with aiohttp.ClientSession() as http, http.post(url + PATH, json=body) as answer:
        content = await answer.text()
        assert answer.status == 200, content
        if not body.get("stream"):
            return json.loads(content)
        *events, done, rest = content.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("route", list(ScoreRoute))
async def test_every_route_to_prompt_logprobs_gives_those_of_a_plain_forward(
    url: str, model: Any, route: ScoreRoute
) -> None:
    client = OpenAIClient(f"{url}/v1", "tiny")
    ids = [*range(40, 60), 258, 7]
    scores = await prompt_scores(client, route, ids, 0.7)
    await client.close()
    assert scores[0] == 0.0
    torch.testing.assert_close(
        torch.tensor(scores[1:], dtype=torch.float32), plain_logprobs(model, ids, 0.7), atol=1e-5, rtol=0
    )


async def test_scores_alone_come_with_no_completion(url: str, model: Any, tokenizer: Tokenizer) -> None:
    answer = await complete(url, prompt="héllo", echo=True, max_tokens=0, logprobs=2, temperature=1)
    [choice] = answer["choices"]
    ids = tokenizer.encode("héllo")
    assert choice["text"] == "héllo"
    assert choice["logprobs"]["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "l", "l", "o"]
    assert choice["logprobs"]["token_logprobs"][0] is None and choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(plain_logprobs(model, ids).tolist(), abs=1e-5)
    assert [len(table) for table in choice["logprobs"]["top_logprobs"][1:]] == [2] * 5
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 0, "total_tokens": 6}


async def test_prompts_of_text_and_of_tokens_are_the_same_prompts(url: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc")
    forms: list[Any] = ["abc", ["abc"], ids, [ids]]
    answers = [await complete(url, prompt=form, max_tokens=5, seed=1, return_token_ids=True) for form in forms]
    choices = [answer["choices"] for answer in answers]
    assert choices == [choices[0]] * 4
    assert choices[0][0]["prompt_token_ids"] == ids and len(choices[0][0]["token_ids"]) <= 5


async def test_the_text_is_that_of_the_tokens_without_control_tokens(url: str, tokenizer: Tokenizer) -> None:
    answer = await complete(url, prompt="a", max_tokens=40, seed=4, ignore_eos=True, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["text"] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_sixteen_tokens_are_the_default(url: str) -> None:
    answer = await complete(url, prompt="a", ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16


async def test_logprobs_lie_where_their_tokens_begin_in_the_text(url: str) -> None:
    answer = await complete(url, prompt="ab", max_tokens=6, seed=2, echo=True, logprobs=1, ignore_eos=True)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["text_offset"][:3] == [0, 1, 2]
    for token, offset in zip(logprobs["tokens"][:2], logprobs["text_offset"][:2], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert len({len(column) for column in logprobs.values()}) == 1


async def test_offsets_count_characters_where_a_character_is_several_tokens(url: str) -> None:
    [choice] = (await complete(url, prompt="a€b", max_tokens=0, echo=True, logprobs=0))["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("seed", range(3))
async def test_a_stream_is_the_whole_in_parts(url: str, seed: int) -> None:
    body: dict[str, Any] = {"prompt": "ab", "max_tokens": 40, "seed": seed, "ignore_eos": True, "echo": True}
    [whole] = (await complete(url, **body, return_token_ids=True))["choices"]
    stop = whole["text"][20:22]  # two characters, wherever their bytes lie
    for stops in ([], [stop]):
        asked = {**body, "stop": stops, "return_token_ids": True}
        [choice] = (await complete(url, **asked))["choices"]
        *parts, usage = await complete(url, **asked, stream=True, stream_options={"include_usage": True})
        chunks = [part["choices"][0] for part in parts]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        assert [token for chunk in chunks for token in chunk["token_ids"]] == choice["token_ids"]
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [choice["finish_reason"]]
        assert usage["usage"]["completion_tokens"] == len(choice["token_ids"])
        assert not any(each in choice["text"][2:] for each in stops)
    assert choice["stop_reason"] == stop and len(choice["token_ids"]) < 40


async def test_a_streams_logprobs_are_those_of_its_tokens(url: str) -> None:
    body: dict[str, Any] = {"prompt": "ab", "max_tokens": 12, "seed": 0, "logprobs": 2, "ignore_eos": True}
    [whole] = (await complete(url, **body))["choices"]
    chunks = [part["choices"][0]["logprobs"] for part in await complete(url, **body, stream=True)]
    for column in ("tokens", "text_offset"):
        assert [entry for chunk in chunks for entry in chunk[column]] == whole["logprobs"][column]


async def test_prompt_logprobs_have_the_tokens_and_their_alternatives_by_name(url: str, tokenizer: Tokenizer) -> None:
    answer = await complete(url, prompt="abc", max_tokens=1, prompt_logprobs=3)
    first, *tables = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    for token, table in zip(tokenizer.encode("bc"), tables, strict=True):
        assert table[str(token)]["decoded_token"] == tokenizer.decode([token])
        assert sorted(entry["rank"] for entry in table.values() if entry["rank"]) == [1, 2, 3]


async def test_what_the_cache_had_of_each_prompt_is_counted_once_whichever_choice_ends_first(
    model_directory: Path,
) -> None:
    chat = chat_of(model_directory)

    async def news() -> AsyncIterator[tuple[int, TokenChunk | GenerationResult]]:
        for index in (3, 0, 2, 1):
            yield index, GenerationResult([70], [0.0], [], "length", None, cached_tokens=10**index)

    body = CompletionRequest(prompt=["a", "b"], n=2, stream=True, stream_options=StreamOptions(include_usage=True))
    stream = completions.stream(chat, body, [[5], [6]], news(), 4)
    *_, last, _ = [event async for event in stream]
    usage = json.loads(last.removeprefix(b"data: "))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 101}


@pytest.mark.parametrize(
    ("sampled", "reason", "stop", "text"),
    [
        ("one EN<|im_start|>D", "stop", "END", "one "),
        ("one EN<|im_start|>D two", "length", None, "one END two"),  # all that was sampled is there
    ],
)
async def test_text_is_cut_where_the_engine_ended_with_a_stop_string_and_nowhere_else(
    model_directory: Path, sampled: str, reason: str, stop: str | None, text: str
) -> None:
    chat = chat_of(model_directory)
    ids = chat.tokenizer.encode(sampled)
    result = GenerationResult(ids, [0.0] * len(ids), [], reason, stop)

    async def news() -> AsyncIterator[tuple[int, TokenChunk | GenerationResult]]:
        for token in ids:
            yield 0, TokenChunk([token], [0.0])
        yield 0, result

    body = CompletionRequest(prompt="a", stop="END")
    [choice] = completions.reply(chat, body, [[5]], [result])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, stop)
    events = [event async for event in completions.stream(chat, body, [[5]], news(), 1)]
    chunks = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == text
