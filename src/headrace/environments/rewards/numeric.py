"""Reward for an answer that is the gold number in any notation."""

from __future__ import annotations

from headrace.environments.rewards.answers import Extract, extract_named
from headrace.environments.rewards.base import Data, gold_of
from headrace.environments.rewards.mathematics.comparison import Numbers, is_number, same
from headrace.environments.rewards.mathematics.latex import Unreadable
from headrace.environments.rewards.mathematics.shapes import Shape, shape_of
from headrace.environments.rewards.registry import register_with_part


@register_with_part("numeric_reward")
class Numeric:
    r"""1.0 if the answer is the number in the task's `field`, else 0.0.

    Commas, currency, units and the form do not matter: `$1,234.50`, `18 dollars`, `3\frac{1}{2}` and `1e3` are numbers.
    The numbers must be equal; a decimal may be rounded past its sixth digit. `tolerance` is an allowed relative error.
    `extract` finds the answer in the text: `final`, `boxed`, `last_number`, `all`, or a function.
    """

    name = "numeric"
    bounded = True

    def __init__(self, field: str = "answer", tolerance: float | None = None, extract: str | Extract = "final") -> None:
        self._field = field
        self._judge = Numbers(tolerance)
        self._extract = extract_named(extract)

    def __call__(self, text: str, data: Data) -> float:
        gold = shape_of_gold(data, self._field)
        if not is_number(gold):
            raise ValueError(f"the task's {self._field!r} is not a number: {data[self._field]!r:.100}")
        answer = shape_of_answer(self._extract(text), variables=False)
        return float(answer is not None and same(gold, answer, self._judge) is True)


def shape_of_gold(data: Data, field: str) -> Shape:
    """Return the parsed gold answer. Raises `ValueError` for one that nothing can be compared with."""
    gold = gold_of(data, field)
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        raise ValueError(f"the task's {field!r} is neither a text nor a number: {gold!r:.100}")
    try:
        return shape_of(str(gold))
    except Unreadable as error:
        raise ValueError(f"the task's {field!r} cannot be read as an answer ({error}): {gold!r:.100}") from error


def shape_of_answer(answer: str | None, variables: bool) -> Shape | None:
    """Return the parsed answer, or None if it cannot be parsed. Without `variables` letters are units and words."""
    try:
        return None if answer is None else shape_of(answer, variables)
    except Unreadable:
        return None
