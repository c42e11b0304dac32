"""The real server process, over real sockets."""

import asyncio
import json
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import torch

from headrace.config.base import ConfigError
from headrace.config.inference import InferenceConfig
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.errors import EngineRejected, EngineUnavailable
from headrace.inference.client.served_model import ServedModel
from headrace.inference.embedded.loading import load_engine
from headrace.inference.schema import SCHEMA_HEADER, ErrorResponse, GenerateResponse, SamplingParams, StructuredOutputs
from headrace.inference.server.chat import ChatRequest
from headrace.inference.server.completions import CompletionRequest
from headrace.inference.server.generate import VllmSampling
from headrace.inference.server.http_server import CannotListen, bind
from headrace.inference.server.main import make_chat, serve
from headrace.inference.server.request_bodies import TokenizeRequest, unsupported_in
from headrace.observe.status import StatusReader
from headrace.orchestrator.sampler import Sampler
from headrace.rollout.version import Version
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer, TokenizerError
from headrace.transport.endpoint import read_endpoint, read_endpoints
from headrace.transport.run_dir import RunDir
from tests.inference import fuzzing
from tests.inference.conftest import ServerProcess
from tests.inference.plain_forward import plain_logprobs
from tests.inference.serving import connect, served

START = 90.0
GENERATE = "/inference/v1/generate"
CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
HELLO = [{"role": "user", "content": "hello"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
Publish = Callable[[Any, Version], Path]


@pytest.fixture(scope="module")
def servers(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two servers, started together since that takes longest: one for all tests, one for the test that ends it."""
    started = [ServerProcess(tmp_path_factory.mktemp("run"), model_directory) for _ in range(2)]
    yield started
    for server in started:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def served_run(servers: list[ServerProcess]) -> RunDir:
    """A run whose server all tests share. They leave its weights and its state as they were."""
    return servers[0].run


@pytest.fixture
def mortal_server(servers: list[ServerProcess]) -> ServerProcess:
    """A server that one test may end."""
    return servers[1]


@pytest_asyncio.fixture
async def client(served_run: RunDir) -> AsyncIterator[EngineClient]:
    client = EngineClient(served_run.endpoints)
    await client.wait_ready(START)
    yield client
    await client.resume()
    await client.close()


@pytest_asyncio.fixture
async def http(client: EngineClient, served_run: RunDir) -> AsyncIterator[aiohttp.ClientSession]:
    (endpoint,) = read_endpoints(served_run.endpoints).values()
    async with aiohttp.ClientSession(
        endpoint.url, headers={"Authorization": f"Bearer {endpoint.admin_key}"}
    ) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(path, data=data) as answer:
        assert answer.headers[SCHEMA_HEADER] == "1"
        return answer.status, await answer.read()


async def until(client: EngineClient, condition: Callable[[Any], bool]) -> None:
    """Wait for the engine to report something; the test's own limit is the deadline."""
    while not condition((await client.health())[0]):
        await asyncio.sleep(0.01)


def near(values: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(values), expected, atol=1e-5, rtol=0)


async def test_many_completions_at_once_have_the_logprobs_of_a_plain_forward(client: EngineClient, model: Any) -> None:
    prompts = [[40 + i, *range(60, 60 + i)] for i in range(24)]
    sampling = SamplingParams(temperature=0.8, max_tokens=6)
    completions = await asyncio.gather(*[client.generate(prompt, sampling) for prompt in prompts])
    [health] = await client.health()
    for prompt, completion in zip(prompts, completions, strict=True):
        near(completion.logprobs, plain_logprobs(model, prompt + completion.token_ids, 0.8)[len(prompt) - 1 :])
        assert [(span.version, span.end) for span in completion.spans] == [(health.version, len(completion.token_ids))]
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 258 else "length")


async def test_logprobs_come_as_objects_or_as_one_list(http: aiohttp.ClientSession) -> None:
    body = {"token_ids": [40, 41], "sampling_params": {"max_tokens": 4, "seed": 1, "logprobs": 0, "ignore_eos": True}}
    (_, plain), (_, flat) = [await post(http, GENERATE, {**body, "flat_logprobs": way}) for way in (False, True)]
    objects, numbers = (json.loads(content)["choices"][0] for content in (plain, flat))
    assert numbers["token_ids"] == objects["token_ids"] and numbers["logprobs"] is None
    assert numbers["flat_logprobs"] == [entry["logprob"] for entry in objects["logprobs"]["content"]]
    for other in ({"stream": True}, {"sampling_params": {"logprobs": 2}}):
        status, content = await post(http, GENERATE, {**body, **other, "flat_logprobs": True})
        assert status == 400 and "flat_logprobs" in json.loads(content)["error"]["message"]


async def test_an_episode_without_training_gets_replies_that_match(client: EngineClient, model_directory: Path) -> None:
    tokenizer = Tokenizer(model_directory)
    sampler = Sampler(client, make_renderer(model_directory, tokenizer), tokenizer, 128, temperature=1.5)
    outputs = StructuredOutputs(choice=["yes", "no"])
    replies = [await sampler.open("s", str(n)).chat(HELLO, structured_outputs=outputs) for n in range(4)]
    assert {reply.text for reply in replies} <= {"yes", "no"}


async def test_scores_are_the_prompts_logprobs(client: EngineClient, model: Any) -> None:
    tokens = list(range(50, 80))
    [health] = await client.health()
    for temperature in (1.0, 0.7):
        scores = await client.score(tokens, temperature)
        assert scores.version == Version.parse(health.version)
        assert scores.logprobs[0] == 0.0
        near(scores.logprobs[1:], plain_logprobs(model, tokens, temperature))
    assert (await client.score([5])).logprobs == [0.0]


async def test_truncated_logprobs_are_reported_beside_untruncated_ones(client: EngineClient, model: Any) -> None:
    prompt = list(range(50, 60))
    cut = await client.generate(prompt, SamplingParams(top_k=1, max_tokens=4, ignore_eos=True))
    near(cut.logprobs, plain_logprobs(model, prompt + cut.token_ids)[len(prompt) - 1 :])
    assert cut.truncated_logprobs == pytest.approx([0.0] * 4, abs=1e-6)  # one choice: certain
    whole = await client.generate(prompt, SamplingParams(max_tokens=4))
    assert whole.truncated_logprobs is None


async def test_generate_answers_in_vllms_form(http: aiohttp.ClientSession) -> None:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "logprobs": 3, "prompt_logprobs": 2}}
    status, content = await post(http, GENERATE, {**body, "request_id": "mine", "cache_salt": "s"})
    assert status == 200
    answer = json.loads(content)
    choice = answer["choices"][0]
    assert answer["request_id"] == "mine"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert answer["prompt_logprobs"][0] is None
    table = answer["prompt_logprobs"][1]
    assert "6" in table and {entry["rank"] for entry in table.values()} >= {1, 2}
    for entry in choice["logprobs"]["content"]:
        likeliest = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(likeliest) == 3 and likeliest == sorted(likeliest, reverse=True)
        assert entry["logprob"] <= likeliest[0]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert choice["weight_versions"][0]["end"] == 2
    assert msgspec.json.decode(content, type=GenerateResponse).choices[0].logprobs is not None


async def test_chat_renders_samples_and_parses(http: aiohttp.ClientSession, model_directory: Path) -> None:
    body = {"messages": HELLO, "temperature": 0, "max_completion_tokens": 4, "logprobs": True, "n": 2}
    status, content = await post(http, CHAT, body)
    assert status == 200
    answer = json.loads(content)
    tokenizer = Tokenizer(model_directory)
    prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)
    _, raw = await post(http, GENERATE, {"token_ids": prompt, "sampling_params": {"temperature": 0, "max_tokens": 4}})
    expected = json.loads(raw)["choices"][0]["token_ids"]
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == 2 * len(expected)
    for choice in answer["choices"]:
        assert choice["message"]["role"] == "assistant"
        assert choice["message"]["content"] == tokenizer.decode(expected, skip_special_tokens=True).strip()
        assert len(choice["logprobs"]["content"]) == len(expected)


async def test_texts_and_conversations_are_tokenized_in_vllms_form(
    http: aiohttp.ClientSession, model_directory: Path
) -> None:
    tokenizer = Tokenizer(model_directory)
    status, content = await post(http, TOKENIZE, {"prompt": "hé<|im_end|>", "add_special_tokens": False})
    assert status == 200
    tokens = tokenizer.encode("hé<|im_end|>")
    assert tokens[-1] == 258
    assert json.loads(content) == {"count": 4, "max_model_len": 128, "tokens": tokens}
    _, content = await post(http, TOKENIZE, {"messages": HELLO, "model": str(model_directory)})
    asked = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)
    assert json.loads(content) == {"count": len(asked), "max_model_len": 128, "tokens": asked}
    assert json.loads((await post(http, TOKENIZE, {"prompt": ""}))[1])["tokens"] == []
    assert json.loads((await post(http, DETOKENIZE, {"tokens": tokens}))[1]) == {"prompt": "hé<|im_end|>"}


async def test_the_same_chat_seed_gives_the_same_choices_but_each_its_own(http: aiohttp.ClientSession) -> None:
    body = {"messages": HELLO, "max_tokens": 8, "seed": 3, "n": 2, "ignore_eos": True}
    answers = [json.loads((await post(http, CHAT, body))[1])["choices"] for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0][0]["message"] != answers[0][1]["message"]


async def events_of(http: aiohttp.ClientSession, path: str, body: Any) -> list[Any]:
    """What is streamed, up to `[DONE]`."""
    status, content = await post(http, path, {**body, "stream": True})
    assert status == 200
    *events, done, rest = content.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_chat_streams_role_content_reason_usage_and_done(http: aiohttp.ClientSession) -> None:
    body = {"messages": HELLO, "seed": 3, "max_tokens": 12, "logprobs": True, "return_token_ids": True}
    answer = json.loads((await post(http, CHAT, body))[1])
    [whole] = answer["choices"]
    role, *parts, usage = await events_of(http, CHAT, {**body, "stream_options": {"include_usage": True}})
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert role["prompt_token_ids"] == answer["prompt_token_ids"]
    choices = [part["choices"][0] for part in parts]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]
    logprobs = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert [entry["logprob"] for entry in logprobs] == pytest.approx(
        [entry["logprob"] for entry in whole["logprobs"]["content"]], abs=1e-5
    )
    assert [token for choice in choices for token in choice.get("token_ids", [])] == whole["token_ids"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [whole["finish_reason"]]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(whole["token_ids"])


async def test_tokens_are_streamed_with_what_is_known_of_the_whole_in_the_last_event(
    http: aiohttp.ClientSession,
) -> None:
    params = {"max_tokens": 6, "seed": 1, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0, "top_k": 5}
    body = {"token_ids": [5, 6, 7], "sampling_params": params, "request_id": "mine"}
    whole = json.loads((await post(http, GENERATE, body))[1])
    *parts, last = await events_of(http, GENERATE, body)
    choices = [event["choices"][0] for event in (*parts, last)]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert {choice["finish_reason"] for choice in choices[:-1]} == {None}
    sampled = [entry["token"] for choice in choices for entry in choice["logprobs"]["content"]]
    assert sampled == [entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["weight_versions"] == whole["choices"][0]["weight_versions"]
    assert len(last["choices"][0]["truncated_logprobs"]) == 6
    assert last["usage"]["total_tokens"] == 9 and len(last["prompt_logprobs"]) == 3
    assert {event["request_id"] for event in (*parts, last)} == {"mine"}


async def test_models_and_health_say_what_is_served(
    http: aiohttp.ClientSession, client: EngineClient, model_directory: Path
) -> None:
    async with http.get("/v1/models") as answer:
        assert [entry["id"] for entry in (await answer.json())["data"]] == [model_directory.name]
        assert answer.headers[SCHEMA_HEADER] == "1"
    [health] = await client.health()
    assert (health.model, health.root) == (model_directory.name, str(model_directory))
    assert (health.capacity, health.max_model_len) == (8, 128)
    assert (health.status, health.paused, health.vocab_size) == ("ok", False, 264)
    async with http.get("/health") as answer:
        assert (await answer.json())["stands_still"] is False


@pytest.mark.parametrize("served_name", [None, "teacher"])
async def test_a_model_is_served_under_the_name_that_is_set(model_directory: Path, served_name: str | None) -> None:
    name = str(model_directory)
    config = InferenceConfig(model={"name": name}, served_name=served_name, max_model_len=64, max_running=2)
    chat = make_chat(config, name, model_directory)
    async with served(await connect(load_engine(config, model_directory, chat.tokenizer)), chat, root=name) as url:
        async with aiohttp.ClientSession(url) as http, http.get("/v1/models") as answer:
            [entry] = (await answer.json())["data"]
        assert (entry["id"], entry["max_model_len"]) == (served_name or model_directory.name, 64)
        for each in (entry["id"], name):  # the path is another name
            model = ServedModel(each, [f"{url}/v1"])
            await model.check()
            await model.check_chat({}, 32)
            await model.close()


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def sampling(**params: Any) -> dict[str, Any]:
    return {"token_ids": [5], "sampling_params": params}


async def test_calls_without_fields_come_with_an_empty_body_or_none(http: aiohttp.ClientSession) -> None:
    for path in ("/pause", "/resume"):
        for body in (b"", b"{}"):
            assert (await post(http, path, body))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        (GENERATE, {"token_ids": []}, 400, "token_ids"),
        (GENERATE, {"token_ids": [5, 264]}, 400, "264"),
        (GENERATE, {"token_ids": [5] * 128}, 400, "max_model_len = 128"),
        (GENERATE, sampling(temperature=-0.5), 400, "temperature"),
        (GENERATE, sampling(temperature="hot"), 400, "sampling_params.temperature"),
        (GENERATE, sampling(max_tokens=0), 400, "max_tokens"),
        (GENERATE, sampling(logprobs=21), 400, "logprobs"),
        (GENERATE, sampling(n=2), 400, "n"),
        (GENERATE, sampling(repetition_penalty=0), 400, "repetition_penalty"),
        (GENERATE, sampling(structured_outputs={"regex": "a", "json_object": True}), 400, "structured_outputs"),
        (GENERATE, sampling(structured_outputs={"structural_tag": "a"}), 400, "structural_tag"),
        (GENERATE, sampling(min_tokens=3), 400, "min_tokens"),
        (GENERATE, sampling(temprature=0.5), 400, "`temprature` - at `sampling_params`"),
        (GENERATE, {"token_ids": [5], "features": {"image": []}}, 400, "features"),
        (GENERATE, sampling(seed=2**63), 400, "seed"),
        (GENERATE, sampling(stop=["a"] * 17), 400, "stop"),
        (GENERATE, sampling(stop="a" * 1025), 400, "stop"),
        (GENERATE, {"sampling_params": {}}, 400, "token_ids"),
        (GENERATE, {"token_ids": [], "stream": True}, 400, "token_ids"),
        (GENERATE, {"token_ids": [5], "model": "gpt-9"}, 404, "gpt-9"),
        (GENERATE, b"{not json", 400, "JSON"),
        (GENERATE, b"", 400, "JSON"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"content": "hello"}]}, 400, "messages[0].role"),
        (CHAT, {"messages": HELLO, "stop": [""]}, 400, "stop"),
        (CHAT, {"messages": HELLO, "top_logprobs": 5}, 400, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        (CHAT, {"messages": HELLO, "presence_penalty": 2.5}, 400, "presence_penalty"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"a": 1}}, 400, "[inference.renderer]"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, {"messages": HELLO, "tools": [ADD]}, 400, "tools: "),
        (TOKENIZE, {"messages": HELLO, "tools": [ADD]}, 400, "tools: "),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, 400, "response_format"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, 400, "response_format"),
        (CHAT, {"messages": HELLO, "guided_choice": ["a"], "guided_regex": "a"}, 400, "guided_regex, guided_choice"),
        (CHAT, {"messages": HELLO, "guided_json": {"type": "wrong"}, "stream": True}, 400, "structured_outputs.json"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 10_000}]}, 400, "max_model_len = 128"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 128}]}, 400, "messages: "),
        (CHAT, {"messages": HELLO, "temprature": 0.5}, 400, "`temprature`"),
        (CHAT, {"messages": HELLO, "reasoning_effort": "low"}, 400, "reasoning_effort"),
        (CHAT, {"messages": HELLO, "parallel_tool_calls": False}, 400, "parallel_tool_calls"),
        (CHAT, {"messages": HELLO, "stream_options": {"continuous_usage_stats": True}}, 400, "continuous_usage_stats"),
        (CHAT, {"messages": HELLO, "n": 0}, 400, "n "),
        (CHAT, {"messages": HELLO, "top_p": 2}, 400, "top_p"),
        (CHAT, {"messages": HELLO, "model": "gpt-9"}, 404, "gpt-9"),
        (COMPLETE, {"prompt": ""}, 400, "prompt[0]: "),
        (COMPLETE, {"prompt": []}, 400, "prompt: "),
        (COMPLETE, {"prompt": ["a", []]}, 400, "prompt[1]: "),
        (COMPLETE, {"prompt": ["a", 5]}, 400, "prompt: "),
        (COMPLETE, {"prompt": [5, 264]}, 400, "264"),
        (COMPLETE, {"prompt": [-1]}, 400, "-1"),
        (COMPLETE, {"prompt": "a" * 128}, 400, "prompt: 128 tokens"),
        (COMPLETE, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETE, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        (COMPLETE, {"prompt": "a", "guided_regex": "b("}, 400, "structured_outputs.regex"),
        (COMPLETE, {"prompt": "a", "n": 2, "best_of": 3}, 400, "best_of"),
        (COMPLETE, {"prompt": ["a"] * 100, "n": 6}, 400, "more than 512"),
        (COMPLETE, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, 400, "stream"),
        (DETOKENIZE, {"tokens": [264]}, 400, "264"),
        (TOKENIZE, {}, 400, "prompt"),
        (TOKENIZE, {"prompt": "a", "messages": HELLO}, 400, "prompt"),
        (TOKENIZE, {"prompt": ["a"]}, 400, "prompt"),
        (TOKENIZE, {"messages": []}, 400, "messages"),
        (TOKENIZE, {"messages": HELLO, "add_generation_prompt": False}, 400, "add_generation_prompt"),
        (TOKENIZE, {"messages": HELLO, "chat_template_kwargs": {"a": 1}}, 400, "[inference.renderer]"),
        (TOKENIZE, {"prompt": "a", "return_token_strs": True}, 400, "return_token_strs"),
        (DETOKENIZE, {"tokens": [5], "skip_special_tokens": True}, 400, "`skip_special_tokens`"),
        (TOKENIZE, {"messages": [{"role": "wizard", "content": "a"}]}, 400, "messages[0].role"),
        (TOKENIZE, {"prompt": "a", "model": "gpt-9"}, 404, "gpt-9"),
        ("/update_weights", {"path": "/nowhere", "incarnation": 0, "step": 1}, 400, "COMPLETE.json"),
        ("/update_weights", {"path": "/", "incarnation": 0, "step": 1, "force": True}, 400, "`force`"),
        (LOAD, {"lora_name": "a", "lora_path": "/", "load_inplace": True}, 400, "`load_inplace`"),
        (UNLOAD, {"lora_name": "a", "lora_int_id": 1}, 400, "lora_name, lora_path"),
        ("/pause", {"mode": "abort"}, 400, "`mode`"),
        ("/resume", {"tags": ["weights"]}, 400, "`tags`"),
        ("/pause", [], 400, "Expected `object`"),
        ("/nowhere", {}, 404, "/nowhere"),
        ("/health", {}, 405, "/health"),
    ],
)
async def test_errors_name_what_is_wrong(
    http: aiohttp.ClientSession, path: str, body: Any, status: int, named: str
) -> None:
    code, content = await post(http, path, body)
    error = msgspec.json.decode(content, type=ErrorResponse).error
    assert code == status
    assert named in error.message
    assert error.type


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}),
        (CHAT, {"messages": HELLO, "tools": [ADD], "tool_choice": "none"}),
        (CHAT, {"messages": HELLO, "modalities": ["text"], "parallel_tool_calls": True, "functions": []}),
        (COMPLETE, {"prompt": "a", "priority": 1, "request_id": "b", "response_format": {"type": "text"}}),
        (COMPLETE, {"prompt": "a", "min_tokens": 0, "skip_special_tokens": True, "length_penalty": 1.0}),
        (GENERATE, {**sampling(skip_special_tokens=False, routed_experts_prompt_start=3, n=1), "priority": 1}),
        (TOKENIZE, {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": False}),
    ],
)
async def test_fields_that_ask_for_nothing_else_are_accepted(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    code, content = await post(http, path, body)
    assert code == 200, content


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        (ChatRequest, {"messages": HELLO}),
        (CompletionRequest, {"prompt": "a"}),
        (TokenizeRequest, {"prompt": "a"}),
        (VllmSampling, {}),
    ],
)
def test_null_is_the_same_as_an_omitted_field(kind: type[msgspec.Struct], needed: dict[str, Any]) -> None:
    body = msgspec.convert({**dict.fromkeys(kind.__struct_fields__), **needed}, kind)
    assert not [*unsupported_in(body)]


async def test_a_client_that_hangs_up_cancels_its_request(client: EngineClient) -> None:
    await client.pause()
    task = asyncio.create_task(client.generate([5], SamplingParams()))
    await until(client, lambda health: health.waiting == 1)
    task.cancel()
    await until(client, lambda health: health.waiting == 0)
    [health] = await client.health()
    assert health.paused


async def test_a_request_in_flight_goes_on_with_the_new_weights(
    client: EngineClient, model: Any, publish: Publish
) -> None:
    [health] = await client.health()
    version = Version(0, Version.parse(health.version).step + 1)
    path = publish(model, version)  # the same weights: other tests share this server
    await client.pause()
    task = asyncio.create_task(client.generate([5, 6], SamplingParams(max_tokens=5, ignore_eos=True)))
    await until(client, lambda health: health.waiting == 1)
    checksum = await client.update_weights(path, version)
    assert checksum == json.loads((path / "COMPLETE.json").read_text())["checksum"]
    assert not task.done()
    await client.resume()
    completion = await task
    assert [(span.version, span.end) for span in completion.spans] == [(str(version), 5)]
    with pytest.raises(EngineRejected, match=str(version)):
        await client.update_weights(path, Version(7, 7))


async def test_the_status_file_has_the_gauges(client: EngineClient, served_run: RunDir) -> None:
    before = StatusReader(served_run.status).read()["inference"].gauges.get("tokens_sampled", 0)
    await client.generate([5], SamplingParams(max_tokens=3, ignore_eos=True))
    while StatusReader(served_run.status).read()["inference"].gauges.get("tokens_sampled", 0) < before + 3:
        await asyncio.sleep(0.05)
    status = StatusReader(served_run.status).read()["inference"]
    assert status.state == "serving"
    assert {"url", "running", "waiting", "version", "tokens_sampled", "tokens_per_second"} <= set(status.gauges)


async def test_a_runs_server_leaves_its_keys_to_the_owner_alone(client: EngineClient, served_run: RunDir) -> None:
    (path,) = served_run.endpoints.glob("inference.*.json")
    endpoint = read_endpoint(path)
    assert endpoint is not None and endpoint.admin_key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with aiohttp.ClientSession(endpoint.url) as http, http.post("/pause") as refused:
        assert refused.status == 401


async def test_no_mutated_request_ends_in_a_5xx_or_is_left_behind(client: EngineClient, served_run: RunDir) -> None:
    (endpoint,) = read_endpoints(served_run.endpoints).values()
    outcome = await fuzzing.fuzz(endpoint, range(400), seed=0)
    assert not outcome.failures
    assert outcome.statuses["200"] > 40 and outcome.statuses["400"] > 40


async def test_sigterm_answers_what_is_in_flight_and_ends_cleanly(mortal_server: ServerProcess) -> None:
    run, process = mortal_server.run, mortal_server.process
    client = EngineClient(run.endpoints, retry_for=0)
    await client.wait_ready(START)
    await client.pause()
    task = asyncio.create_task(client.generate([5], SamplingParams()))
    await until(client, lambda health: health.waiting == 1)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await task
    assert await asyncio.to_thread(process.wait, START) == 0
    assert not list(run.endpoints.iterdir())
    assert StatusReader(run.status).read()["inference"].state == "done"
    await client.close()


def test_a_port_in_use_is_one_clear_line(model_directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = InferenceConfig(model={"name": str(model_directory)}, port=port)
        with pytest.raises(CannotListen) as caught:
            serve(config, status=None, run=None)
    assert f"inference.port = {port}" in str(caught.value) and "\n" not in str(caught.value)


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(CannotListen, match=host):
            bind(host, 0)


def test_a_model_directory_without_tokenizer_is_refused(model_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_directory / "config.json").read_text())
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        serve(InferenceConfig(model={"name": str(tmp_path)}), status=None, run=None)


def test_no_model_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"model\.name"):
        serve(InferenceConfig(), status=None, run=None)
