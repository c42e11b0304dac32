"""langchain: a chat, a stream, structured output, tools that are described, and the responses API."""

import json
import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """Whether it is so."""

    yes: bool


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


url, name = sys.argv[1:]
free = ChatOpenAI(base_url=url, api_key="none", model=name, max_retries=0)
model = ChatOpenAI(base_url=url, api_key="none", model=name, max_tokens=24, max_retries=0)
chat = model.invoke("Hello")
chunks = list(model.stream("Hello"))
answer = free.with_structured_output(Answer, method="json_schema").invoke("Hello")
with_tools = model.bind_tools([add]).invoke("Hello")
response = ChatOpenAI(base_url=url, api_key="none", model=name, use_responses_api=True, max_tokens=24).invoke("Hello")
print(
    json.dumps(
        {
            "tokens": chat.usage_metadata["output_tokens"],
            "chunks": len(chunks),
            "answer": answer.model_dump(),
            "prompt_grows": with_tools.usage_metadata["input_tokens"] > chat.usage_metadata["input_tokens"],
            "response": response.usage_metadata["output_tokens"],
        }
    )
)
