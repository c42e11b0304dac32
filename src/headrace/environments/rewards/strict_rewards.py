"""Rewards for completions in the strict format: the format itself, brief thinking, and token utilisation.

The thinking length is in words, or in tokens of a tokenizer. A malformed completion has none: it earns nothing by being
short, and does not change its group's mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import msgspec

from headrace.environments.arguments import BadArgument, check_flag, check_whole
from headrace.environments.rewards.base import Counts, Data, SandboxReward, gold_of, group_reward, register_reward
from headrace.environments.rewards.math_rewards import Correctness
from headrace.environments.strict_format import format_of
from headrace.environments.tables import DataError, example_key
from headrace.errors import BadInput
from headrace.text.tokenizer import shared_tokenizer

TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]

Length = Callable[[str], int]


@register_reward
def format_tag_reward(text: str, data: Data) -> float:
    """1.0 for the strict format with an answer in its box, else 0.0."""
    return float(format_of(data).parse(text) is not None)


format_tag_reward.bounded = True  # type: ignore[attr-defined]


@register_reward("length_penalty_reward")
@group_reward
class LengthPenalty:
    """max(0, 1 - L / mean L) within the group, L being the thinking length in tokens or words.

    Malformed completions score 0 and are left out of the mean; with `count_malformed` they count in it, with L = 0.
    Where the mean is 0, all score 0. A group is `group_size` completions, or consecutive ones with equal prompts.
    Tokens are those of `tokenizer_name`, a directory, one in `cache_dir`, or a model on the hub; unset, words are
    counted.
    """

    name = "length_penalty"

    def __init__(
        self,
        tokenizer_name: str | None = None,
        group_size: int | None = None,
        cache_dir: str | None = None,
        count_malformed: bool = False,
    ) -> None:
        if group_size is not None:
            check_whole("group_size", group_size, 1)
        check_flag("count_malformed", count_malformed)
        self._group_size = group_size
        self._count_malformed = count_malformed
        self._length = make_length_counter(tokenizer_name, cache_dir)

    def __call__(self, texts: Sequence[str], data: Sequence[Data]) -> list[float]:
        lengths = measure_thinking(texts, data, self._length)
        if self._group_size is not None:
            sizes = [self._group_size] * -(-len(texts) // self._group_size)
        else:
            sizes = [len(list(equal)) for _, equal in groupby(data, key=lambda row: row.get("prompt", row))]
        groups = [lengths[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
        return [score for group in groups for score in brevity(group, self._count_malformed)]


def brevity(lengths: Sequence[int | None], count_malformed: bool = False) -> list[float]:
    """Return max(0, 1 - L / mean L) for each length of a group.

    None is a malformed completion: it scores 0, and counts in the mean as 0 only with `count_malformed`.
    """
    counted = [length or 0 for length in lengths if length is not None or count_malformed]
    mean = sum(counted) / len(counted) if counted else 0.0
    return [max(0.0, 1 - length / mean) if length is not None and mean else 0.0 for length in lengths]


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
        self._length = make_length_counter(tokenizer_name, cache_dir)
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
    """Return (length - base) / max(base, 1), clipped to [-1, 1]; `base` is the length of the base model's thinking."""
    return max(-1.0, min(1.0, (length - base) / max(base, 1)))


class ZeroShotRecord(msgspec.Struct, frozen=True):
    """The base model's result on one example."""

    key: str
    correct: bool
    thinking_tokens: float


def read_zero_shot(path: str | Path) -> dict[str, ZeroShotRecord]:
    """Return the record of each example by its key, from JSONL with `key`, `correct` and `thinking_tokens`.

    Other fields are ignored, so that the completions of an evaluation can be such a record.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        fix = "Evaluate the base model first, which writes it."
        raise DataError("no such file", key="zero_shot_path", value=file, fix=fix)
    records: dict[str, ZeroShotRecord] = {}
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                record = msgspec.json.decode(line, type=ZeroShotRecord)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise DataError(f"not a record of an example: {error}", file=file, line=number) from error
            if records.setdefault(record.key, record) != record:
                fact = "an earlier line has another record of this example"
                raise DataError(fact, key="key", value=record.key, file=file, line=number)
    return records


def measure_thinking(texts: Sequence[str], data: Sequence[Mapping[str, Any]], length: Length) -> list[int | None]:
    """Return the thinking length of each completion; None for a malformed one."""
    parsed = (format_of(row).parse(text) for text, row in zip(texts, data, strict=True))
    return [None if completion is None else length(completion.thinking) for completion in parsed]


def count_words(text: str) -> int:
    return len(text.split())


def make_length_counter(tokenizer_name: str | None, cache_dir: str | Path | None = None) -> Length:
    """Return a function that counts tokens without special ones, or words if there is no tokenizer."""
    if not tokenizer_name:
        return count_words
    tokenizer = shared_tokenizer(tokenizer_directory(tokenizer_name, cache_dir))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def tokenizer_directory(name: str, cache_dir: str | Path | None = None) -> Path:
    """Return the directory of a tokenizer: as given, in `cache_dir`, or of a model downloaded there from the hub."""
    folders = [Path(name).expanduser(), *([Path(cache_dir).expanduser() / name] if cache_dir is not None else [])]
    for folder in folders:
        if folder.is_dir():
            return folder
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        fact = f"no such directory; looked for {' and '.join(map(str, folders))}"
        raise BadInput(fact, key="tokenizer_name", value=name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, cache_dir=cache_dir, allow_patterns=TOKENIZER_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        fact = f"neither a directory ({' or '.join(map(str, folders))}) nor a model on the hub"
        raise BadInput(f"{fact}: {type(error).__name__}: {error}", key="tokenizer_name", value=name) from error


SCORE = "headrace.environments.adapters.reasoning_gym_family:score"
MAX_ANSWER_CHARACTERS = 100_000
"""The longest gold answers, moves of Hanoi's tower, have a third of that."""


@register_reward("reasoning_gym_reward")
class ReasoningGymReward(SandboxReward):
    """The score, from 0 to 1, that the task's reasoning-gym family gives to the boxed answer of the strict format.

    An answer on which the scorer fails, or takes longer than `timeout` seconds, scores 0 and is counted.
    """

    name = "reasoning_gym"
    timeout_counter = failure_counter = "scorer_errors"

    def __init__(self, timeout: float = 5.0, processes: int = 2) -> None:
        counts = Counts("reasoning_gym_reward", scorer_errors="answers that a scorer failed on")
        super().__init__(timeout, processes, counts, untrusted=True)  # some scorers evaluate the answer

    async def __call__(self, text: str, data: Data) -> float:
        parsed = format_of(data).parse(text)
        if parsed is None:
            return 0.0
        task = {"question": data["question"], "answer": data["answer"], "metadata": data["metadata"]}
        return await self.score(data["family"], data["settings"], parsed.answer, task) or 0.0

    async def score(self, family: str, settings: Data, answer: str, task: Data) -> float | None:
        """Return the family's score of an answer, 0 for one that is too long; None if the scorer fails on it."""
        if len(answer) > MAX_ANSWER_CHARACTERS:
            return 0.0
        score = await self._check(SCORE, family, dict(settings), answer, dict(task))
        return None if score is None else float(score)
