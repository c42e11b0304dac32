"""litellm: a chat, a stream, a structured chat, a text completion and a response."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

url, name = sys.argv[1:]
SCHEMA = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
SCHEMA["additionalProperties"] = False
asked = {"model": f"openai/{name}", "api_base": url, "api_key": "none"}
messages = [{"role": "user", "content": "Hello"}]
chat = litellm.completion(**asked, messages=messages, max_tokens=8, frequency_penalty=0.5)
stream = litellm.completion(**asked, messages=messages, max_tokens=8, stream=True)
form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
structured = litellm.completion(**asked, messages=messages, response_format=form)
text = litellm.text_completion(**{**asked, "model": f"text-completion-openai/{name}"}, prompt="Hello", max_tokens=4)
response = litellm.responses(**asked, input="Hello", max_output_tokens=8)
print(
    json.dumps(
        {
            "tokens": chat.usage.completion_tokens,
            "reason": [chunk.choices[0].finish_reason for chunk in stream][-1],
            "structured": json.loads(structured.choices[0].message.content),
            "text": text.choices[0].finish_reason,
            "response": response.status,
        }
    )
)
