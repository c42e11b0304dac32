"""An agent that answers arithmetic with a calculator. It knows OpenAI's client, and nothing of training.

CalculatorAgent(AsyncOpenAI(), "gpt-4.1-mini").answer("12*7=?")
"""

import ast
import json
import operator

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall, ChatCompletionMessageParam

SYSTEM = "Use calc."
TOOLS = [
    {
        "type": "function",
        "function": {"name": "calc", "parameters": {"type": "object", "properties": {"e": {"type": "string"}}}},
    }
]
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class CalculatorAgent:
    def __init__(self, client: AsyncOpenAI, model: str, max_steps: int = 3) -> None:
        self.client = client
        self.model = model
        self.max_steps = max_steps

    async def answer(self, question: str) -> str:
        messages: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question},
        ]
        for _ in range(self.max_steps):
            completion = await self.client.chat.completions.create(
                model=self.model, messages=messages, tools=TOOLS, temperature=0
            )
            message = completion.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": self.run(call)})
        return ""

    def run(self, call: ChatCompletionMessageFunctionToolCall) -> str:
        try:
            return str(calculate(json.loads(call.function.arguments)["e"]))
        except Exception as error:
            return f"error: {type(error).__name__}"


def calculate(expression: str) -> int:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(expression)

    return value(ast.parse(expression, mode="eval").body)
