"""Agents as others write them, against OpenAI's client and nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

import httpx
from openai import AsyncOpenAI, BadRequestError, OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "q": {"type": "string"}}},
    },
}
FRESH = httpx.Limits(max_keepalive_connections=0)
"""Each test has an event loop of its own, and a connection cannot be taken from one to another."""
shared = AsyncOpenAI(api_key="none", http_client=httpx.AsyncClient(verify=False, limits=FRESH))
shared_sync = OpenAI(api_key="none", http_client=httpx.Client(verify=False, limits=FRESH))
late: list[int] = []
release = threading.Event()


async def ask(data: dict[str, Any], base_url: str, api_key: str, model: str) -> str | None:
    client = shared.with_options(base_url=base_url, api_key=api_key)
    messages: Any = [{"role": "user", "content": data["question"]}]
    reply = await client.chat.completions.create(model=model, messages=messages, temperature=0.2, seed=3)
    return reply.choices[0].message.content


def ask_in_thread(data: dict[str, Any], base_url: str, api_key: str, model: str) -> str | None:
    client = shared_sync.with_options(base_url=base_url, api_key=api_key)
    messages: Any = [{"role": "user", "content": data["question"]}]
    return client.chat.completions.create(model=model, messages=messages).choices[0].message.content


async def use_tools(data: dict[str, Any], base_url: str, api_key: str, model: str) -> str | None:
    """The loop of every tutorial: the client's own message goes back as it came."""
    client = shared.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": data["question"]}]
    while True:
        reply = await client.chat.completions.create(model=model, messages=messages, tools=[ADD])  # type: ignore[list-item]
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            result = json.loads(call.function.arguments).get("a", 0) + 1  # type: ignore[union-attr]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def delegate(data: dict[str, Any], base_url: str, api_key: str, model: str) -> str | None:
    """Two sub-agents with prompts of their own at once, then the main agent."""
    client = shared.with_options(base_url=base_url, api_key=api_key)

    async def sub(name: str) -> str:
        messages: Any = [{"role": "system", "content": f"You are {name}."}, {"role": "user", "content": "go"}]
        first = (await client.chat.completions.create(model=model, messages=messages)).choices[0].message
        messages += [first, {"role": "user", "content": "again"}]
        return str((await client.chat.completions.create(model=model, messages=messages)).choices[0].message.content)

    replies = await asyncio.gather(sub("left"), sub("right"))
    messages: Any = [{"role": "user", "content": " ".join(replies)}]
    return (await client.chat.completions.create(model=model, messages=messages)).choices[0].message.content


async def until_full(data: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    client = shared.with_options(base_url=base_url, api_key=api_key)
    messages: Any = [{"role": "user", "content": data["question"]}]
    while True:
        try:
            reply = await client.chat.completions.create(model=model, messages=messages)
        except BadRequestError as error:
            if error.code != "context_length_exceeded" or data.get("crash"):
                raise
            return "full"
        messages += [reply.choices[0].message, {"role": "user", "content": "more " * 20}]


async def ask_and_fail(data: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
    await ask(data, base_url, api_key, model)
    raise ValueError("no brackets in the reply")


async def ask_and_exit(data: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
    await ask(data, base_url, api_key, model)
    sys.exit(3)


async def swallow_errors(data: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    try:
        return str(await ask(data, base_url, api_key, model))
    except Exception:
        return "sorry"


async def never_ask(data: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    return "42"


async def leave_a_call_behind(data: dict[str, Any], base_url: str, api_key: str, model: str) -> str | None:
    answer = await ask(data, base_url, api_key, model)

    def later() -> None:
        release.wait(30)
        try:
            ask_in_thread(data, base_url, api_key, model)
        except Exception as error:
            late.append(error.status_code)  # type: ignore[attr-defined]

    threading.Thread(target=later, daemon=True).start()
    return answer


async def sleep_forever(data: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
    await asyncio.sleep(1000)


def sleep_in_thread(data: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
    time.sleep(1000)


async def ask_twice(data: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
    client = shared.with_options(base_url=base_url, api_key=api_key)
    messages: Any = [{"role": "user", "content": data["question"]}]
    first = (await client.chat.completions.create(model=model, messages=messages)).choices[0].message
    messages += [first, {"role": "user", "content": "again"}]
    second = (await client.chat.completions.create(model=model, messages=messages)).choices[0].message
    return f"{first.content}{second.content}"
