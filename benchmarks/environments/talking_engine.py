"""The fake engine as a process that calls tools: a call where the prompt offers tools, words once a tool has answered.

python benchmarks/environments/talking_engine.py MODEL ENDPOINT --tokens 64 --median 0.5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "orchestrator"))

from fake_engine import ANSWERS, FakeEngine, encode_answer, letters

from headrace.text.tokenizer import Tokenizer

SIGMA = 0.5


class Asked(msgspec.Struct):
    """Of a request, what decides the answer."""

    token_ids: list[int]


class TalkingEngine(FakeEngine):
    """Replies of about `tokens`, in Qwen3's format; what they call is the calculator."""

    def __init__(self, model: Path, tokens: int, median: float, seed: int = 0) -> None:
        super().__init__(model, tokens, median, SIGMA, seed)
        rng = random.Random(seed + 1)
        tokenizer = Tokenizer(model)
        self.calls = [encode_answer(tokenizer, call(tokens, rng), rng) for _ in range(ANSWERS)]
        self.offer = tokenizer.convert_tokens_to_ids("<tool_call>")
        self.result = tokenizer.convert_tokens_to_ids("<tool_response>")

    def choose(self, request: bytes) -> tuple[bytes, bytes]:
        asked = msgspec.json.decode(request, type=Asked).token_ids
        calls = self.offer in asked and self.result not in asked
        return self._rng.choice(self.calls) if calls else super().choose(request)


def call(tokens: int, rng: random.Random) -> str:
    """Some thoughts, as long as there is room for them, and a call."""
    arguments = {"expression": f"{rng.randrange(10**4)} * {rng.randrange(10**4)}"}
    body = json.dumps({"name": "calculate", "arguments": arguments})
    thought = f"<think>\n{letters(max(1, tokens - len(body) - 10), rng)}\n</think>\n\n"
    return f"{thought}<tool_call>\n{body}\n</tool_call>"


async def serve(arguments: argparse.Namespace) -> None:
    engine = TalkingEngine(arguments.model, arguments.tokens, arguments.median)
    async with await engine.listen(arguments.endpoint) as server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("endpoint", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--median", type=float, default=0.5, help="seconds")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
