"""openai-agents over responses and over chats: an agent with a structured answer, and one with a tool, streamed."""

import asyncio
import json
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    yes: bool


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main(url: str, name: str) -> None:
    set_tracing_disabled(True)
    client, results = AsyncOpenAI(base_url=url, api_key="none", max_retries=0), {}
    # A random model rarely ends by itself, and a response that is cut is an error here.
    settings = ModelSettings(extra_body={"stop": list("aeionrst")})
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model=name, openai_client=client)
        answer = await Runner.run(Agent(name="a", model=model, output_type=Answer), "Hello")
        helper = Agent(name="b", instructions="Be brief.", model=model, tools=[add], model_settings=settings)
        streamed = Runner.run_streamed(helper, "Hello")
        events = [event.type async for event in streamed.stream_events()]
        results[kind.__name__] = {"answer": answer.final_output.model_dump(), "events": len(events)}
    print(json.dumps(results))


asyncio.run(main(*sys.argv[1:]))
