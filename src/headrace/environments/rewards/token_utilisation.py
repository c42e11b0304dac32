"""Reward for spending more thinking tokens than the base model only where they lead to a solution.

The base model's zero-shot record is JSONL with `key`, `correct` and `thinking_tokens` of each example. Other fields are
ignored, so that the completions of an evaluation can be such a record.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.environments.arguments import BadArgument
from headrace.environments.data.rows import example_key
from headrace.environments.data.tables import DataError
from headrace.environments.rewards.base import Counts, Data, gold_of
from headrace.environments.rewards.correctness import Correctness
from headrace.environments.rewards.registry import register_reward
from headrace.environments.rewards.thinking import length_in
from headrace.environments.strict_format import format_of


@register_reward("token_utilisation_reward")
class TokenUtilisation:
    """-beta * max(u, 0) where the base model was right, +beta * max(u, 0) where only this completion is right.

    u = (L - L_base) / max(L_base, 1), clipped to [-1, 1], L being the thinking length in tokens of `tokenizer_name`.
    All other completions, malformed ones included, score 0. The base model's record is in `zero_shot_path`; an example
    without one scores 0 and is counted. `timeout`, `processes` and `symbolic` are those of `gsm8k_correctness_reward`.
    """

    name = "token_utilisation"
    bounded = True

    def __init__(
        self,
        zero_shot_path: str | Path,
        tokenizer_name: str,
        beta: float = 0.1,
        cache_dir: str | None = None,
        timeout: float = 5.0,
        processes: int = 2,
        symbolic: bool = True,
    ) -> None:
        if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 <= beta < float("inf"):
            raise BadArgument("expected a number that is not negative", key="beta", value=beta)
        self._records = read_zero_shot(zero_shot_path)
        self._beta = beta
        self._length = length_in(tokenizer_name, cache_dir)
        self._correctness = Correctness(timeout, processes, symbolic)
        self._missing = Counts("token_utilisation_reward", without_record="completions without a zero-shot record")

    @property
    def counts(self) -> dict[str, int]:
        return {**self._correctness.counts, **self._missing}

    async def __call__(self, text: str, data: Data) -> float:
        record = self._records.get(example_key(gold_of(data, "prompt"), gold_of(data, "answer"), data))
        if record is None:
            self._missing.add("without_record")
        parsed = format_of(data).parse(text)
        if record is None or parsed is None:
            return 0.0
        change = self._beta * max(0.0, utilisation(self._length(parsed.thinking), record.thinking_tokens))
        if not change or not (record.correct or await self._correctness(text, data)):
            return 0.0
        return -change if record.correct else change

    async def close(self) -> None:
        await self._correctness.close()


def utilisation(length: float, base: float) -> float:
    """Return how much longer than the base model's thinking a length is, relative to the latter, from -1 to 1."""
    return max(-1.0, min(1.0, (length - base) / max(base, 1)))


class ZeroShot(msgspec.Struct, frozen=True):
    key: str
    correct: bool
    thinking_tokens: float


def read_zero_shot(path: str | Path) -> dict[str, ZeroShot]:
    """Return the record of each example by its key."""
    file = Path(path).expanduser()
    if not file.is_file():
        fix = "Evaluate the base model first, which writes it."
        raise DataError("no such file", key="zero_shot_path", value=file, fix=fix)
    records: dict[str, ZeroShot] = {}
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                record = msgspec.json.decode(line, type=ZeroShot)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise DataError(f"not a record of an example: {error}", file=file, line=number) from error
            if records.setdefault(record.key, record) != record:
                fact = "an earlier line has another record of this example"
                raise DataError(fact, key="key", value=record.key, file=file, line=number)
    return records
