"""`/v1/responses`: requests as chats, messages as items, and the events of a stream as OpenAI's client reads them."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai._models import construct_type
from openai.types.responses import Response, ResponseStreamEvent

from headrace.inference.backend import GenerationResult, InvalidRequest, TokenChunk
from headrace.inference.server import responses
from headrace.inference.server.chat import Chat
from headrace.inference.server.responses import ResponsesRequest
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from tests.inference.serving import backend_of, chat_of, served

ADD = {"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True}
TEXT = (
    "<think>\nsum\n</think>\n\nI add."
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>'
)


@pytest.fixture
def chat(tiny_model: Path) -> Chat:
    tokenizer = Tokenizer(tiny_model)
    return Chat("tiny", tokenizer, make_renderer(tiny_model, tokenizer))


def ask(**fields: Any) -> ResponsesRequest:
    return msgspec.convert({"input": "add 1 and 2", **fields}, ResponsesRequest)


async def events_of(chat: Chat, body: ResponsesRequest, text: str) -> list[Any]:
    """The events of a reply that arrives token by token, as the client's types, checked for unknown shapes."""
    ids, chat_body = chat.tokenizer.encode(text), body.chat_request()

    async def updates() -> AsyncIterator[tuple[int, TokenChunk | GenerationResult]]:
        for token in ids:
            yield 0, TokenChunk([token], [0.0])
        yield 0, GenerationResult(ids, [0.0] * len(ids), [], "stop", None)

    events = []
    async for content in responses.stream(chat, body, chat_body, chat.prompt(chat_body), updates()):
        name, data = content.decode().rstrip().split("\n")
        fields = msgspec.json.decode(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        event: Any = construct_type(type_=ResponseStreamEvent, value=fields)
        type(event).model_validate(fields)
        events.append(event)
    return events


async def test_a_reply_and_its_stream_have_the_same_items(chat: Chat) -> None:
    body = ask(tools=[ADD], instructions="Be brief.")
    chat_body, ids = body.chat_request(), chat.tokenizer.encode(TEXT)
    prompt = chat.prompt(chat_body)
    assert "Be brief." in chat.tokenizer.decode(prompt) and '"name": "add"' in chat.tokenizer.decode(prompt)
    result = GenerationResult(ids, [0.0] * len(ids), [], "stop", None)
    whole = Response.model_validate(responses.reply(chat, body, chat_body, prompt, result))
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (whole.output_text, whole.status) == ("I add.", "completed")
    assert [item.arguments for item in whole.output if item.type == "function_call"] == ['{"a":1}', "{}"]
    assert whole.usage is not None and whole.usage.input_tokens == len(prompt)

    events = await events_of(chat, body, TEXT)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed" and events[-1].response.id == events[0].response.id
    bare = {"id", "call_id"}
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump(exclude=bare) for item in done] == [item.model_dump(exclude=bare) for item in whole.output]
    assert done == events[-1].response.output
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "sum"


def test_items_become_the_messages_of_a_chat() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "add"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "sum"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "3"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "4"}]},
        {"role": "assistant", "content": "3"},
        {"role": "assistant", "content": "and 4"},
    ]
    calls = [{"id": key, "type": "function", "function": {"name": "add", "arguments": "{}"}} for key in "ab"]
    assert ask(input=items).chat_request().messages == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "add"},
        {"role": "assistant", "reasoning_content": "sum", "content": "I add.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "3"},
        {"role": "tool", "tool_call_id": "b", "content": "4"},
        {"role": "assistant", "content": "3"},
        {"role": "assistant", "content": "and 4"},
    ]


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ],
)
def test_what_needs_storage_or_is_not_supported_is_refused(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ask(**fields).chat_request()
    assert refusal.value.key == key


async def test_openais_client_gets_texts_structures_logprobs_and_streams(model: Any, model_directory: Path) -> None:
    async with (
        served(await backend_of(model, model_directory), chat_of(model_directory)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked: Any = {"model": "tiny", "input": "hello", "max_output_tokens": 12, "extra_body": {"seed": 1}}
        cut = await client.responses.create(**asked, store=False, include=["message.output_text.logprobs"])
        assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"
        assert cut.usage is not None and cut.usage.output_tokens == 12
        [message] = cut.output
        assert message.type == "message" and message.content[0].type == "output_text"
        assert len(message.content[0].logprobs or []) == 12
        async with client.responses.stream(**asked) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        assert text == cut.output_text
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        schema["additionalProperties"] = False
        form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
        whole = await client.responses.create(model="tiny", input="hello", text=form)
        assert msgspec.json.decode(whole.output_text)["a"] in (1, 2) and whole.status == "completed"
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model="tiny", input="hello", previous_response_id="resp_1")
