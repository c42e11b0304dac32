r"""Sums of one digit in place of GSM8K and MATH, and demonstrations in the strict format that think too much.

A demonstration works its sum out up to six times before the answer is boxed:

    <think>
    7+5=12
    7+5=12
    </think>

    \boxed{12}

How often is left to chance and says nothing about the answer, so that brief thoughts are as good as long ones, and
only a reward for brevity tells them apart. Some answers are wrong from the first line on, and some lack their box.
"""

import random
from collections.abc import Iterator, Sequence

from headrace.environments.base import Demonstration, Environment
from headrace.environments.hackable import TrainingSample, build_data_provider, register_data_provider
from headrace.environments.strict_format import StrictFormat

MOST_LINES = 6
PLAIN = {"digits": 1, "operations": "+-", "instructions": ""}
"""Only the question: the model has a byte vocabulary and was never trained on instructions."""


@register_data_provider
def sums(split: str = "train", levels: Sequence[int] | None = None, seed: int = 0) -> Iterator[TrainingSample]:
    """Sums and differences; as MATH has them, `levels` go from 1 (both numbers below 2) to 5 (one of them 8 or 9)."""
    for sample in build_data_provider("arithmetic", {**PLAIN, "split": split, "seed": seed}):
        level = max(int(digit) for digit in sample.info["question"] if digit.isdecimal()) // 2 + 1
        if levels is None or level in levels:
            yield TrainingSample(sample.prompt, sample.answer, {**sample.info, "level": level})


class Thoughts(Environment):
    """What `headrace sft` learns from: `mistakes` and `malformed` are shares of the demonstrations."""

    def __init__(self, mistakes: float, malformed: float) -> None:
        self._mistakes = mistakes
        self._malformed = malformed

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        rng = random.Random(f"thoughts-{seed}")
        samples = list(sums())
        while True:
            sample = rng.choice(samples)
            off = rng.choice([-2, -1, 1, 2]) if rng.random() < self._mistakes else 0
            answer = str(int(sample.answer) + off)
            lines = [f"{sample.prompt}={answer}"] * rng.randint(1, MOST_LINES)
            reply = StrictFormat().write("\n".join(lines), answer)
            if rng.random() < self._malformed:
                reply = reply.replace(rf"\boxed{{{answer}}}", answer)
            yield Demonstration([{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": reply}])
