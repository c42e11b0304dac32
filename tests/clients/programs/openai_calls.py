"""OpenAI's client, version 2 or 3: chats, streams, structures, logprobs, text completions and responses."""

import json
import sys

import openai
from pydantic import BaseModel


class Answer(BaseModel):
    yes: bool


url, name = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
[model] = client.models.list()
messages = [{"role": "user", "content": "Hello"}]
chat = client.chat.completions.create(
    model=name, messages=messages, max_tokens=8, logprobs=True, top_logprobs=2, presence_penalty=0.5
)
stream = client.chat.completions.create(model=name, messages=messages, max_tokens=8, stream=True)
parsed = client.chat.completions.parse(model=name, messages=messages, response_format=Answer)
completion = client.completions.create(model=name, prompt="Hello", max_tokens=0, logprobs=1, echo=True)
response = client.responses.parse(model=name, input="Hello", text_format=Answer)
with client.responses.stream(model=name, input="Hello", max_output_tokens=8) as events:
    kinds = [event.type for event in events]
print(
    json.dumps(
        {
            "version": int(openai.__version__.split(".")[0]),
            "model": model.id,
            "logprobs": len(chat.choices[0].logprobs.content),
            "tokens": chat.usage.completion_tokens,
            "reasons": [chunk.choices[0].finish_reason for chunk in stream][-1],
            "parsed": parsed.choices[0].message.parsed.model_dump(),
            "echoed": completion.choices[0].text,
            "response": response.output_parsed.model_dump(),
            "events": [kinds[0], kinds[-1]],
        }
    )
)
