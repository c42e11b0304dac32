"""Gold answers of GSM8K, MATH and MATH-500, each rewritten in several ways and each spoilt in several ways.

    python benchmarks/environments/math_answers.py --gsm8k DIR --math DIR --math500 DIR [--split test]

Every gold answer must score 1.0 in each rewritten form (answer_forms.RIGHT), of which three at least must apply to it,
and 0.0 in each spoilt one (answer_forms.WRONG): by `Symbolic`, in a box, and those of GSM8K also by `Numeric`, after
`####`. What does not is listed.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from answer_forms import RIGHT, WRONG

from headrace.environments.rewards.math_rewards import Numeric, Symbolic
from headrace.environments.shipped.word_problems import gsm8k, math

AT_ONCE = 64
ENOUGH_FORMS = 3


class Tally:
    def __init__(self) -> None:
        self.checked: Counter[tuple[str, str]] = Counter()
        self.right: Counter[tuple[str, str]] = Counter()
        self.exceptions: list[str] = []

    def add(self, data: str, form: str, gold: str, written: str, score: float, wanted: float) -> None:
        self.checked[data, form] += 1
        self.right[data, form] += score == wanted
        if score != wanted:
            self.exceptions.append(f"{data}, {form}: {gold!r} as {written!r} scored {score}")


def written_forms(gold: str) -> Iterator[tuple[str, str, float]]:
    for wanted, rules in ((1.0, RIGHT), (0.0, WRONG)):
        for form, rule in rules.items():
            written = rule(gold)
            if written is not None:
                yield form, written, wanted


async def check(data: str, golds: list[str], symbolic: Symbolic, numeric: Numeric | None, tally: Tally) -> None:
    places = asyncio.Semaphore(AT_ONCE)

    async def check_one(gold: str) -> None:
        async with places:
            forms = list(written_forms(gold))
            for form, written, wanted in forms:
                score = await symbolic(f"So it is $\\boxed{{{written}}}$.", {"answer": gold})
                tally.add(data, form, gold, written, score, wanted)
                if numeric is not None:
                    score = numeric(f"Some steps.\n#### {written.strip()}", {"answer": gold})
                    tally.add(f"{data}, numeric", form, gold, written, score, wanted)
            if sum(wanted for _, _, wanted in forms) < ENOUGH_FORMS:
                tally.exceptions.append(f"{data}: fewer than {ENOUGH_FORMS} forms apply to {gold!r}")

    await asyncio.gather(*map(check_one, golds))


async def run(sets: dict[str, list[str]]) -> Tally:
    tally, symbolic = Tally(), Symbolic()
    try:
        for data, golds in sets.items():
            start = time.perf_counter()
            numeric = Numeric() if data == "GSM8K" else None
            await check(data, golds, symbolic, numeric, tally)
            print(f"{data}: {len(golds):,} answers in {time.perf_counter() - start:.0f} s")
    finally:
        await symbolic.close()
    counts = symbolic.counts
    print(f"comparisons that took too long: {counts['timeouts']}, that failed: {counts['failures']}\n")
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("gsm8k", "math", "math500"):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR")
    parser.add_argument("--split", default="test")
    given = parser.parse_args()
    rows = {
        "GSM8K": gsm8k(given.gsm8k, given.split) if given.gsm8k else (),
        "MATH": math(given.math, given.split) if given.math else (),
        "MATH-500": math(given.math500, given.split) if given.math500 else (),
    }
    tally = asyncio.run(run({data: [row["answer"] for row in found] for data, found in rows.items() if found}))
    print(f"{'data':<16}{'form':<16}{'checked':>8}{'right':>8}{'exceptions':>12}")
    for (data, form), checked in tally.checked.items():
        right = tally.right[data, form]
        print(f"{data:<16}{form:<16}{checked:>8,}{right:>8,}{checked - right:>12,}")
    print(f"\nexceptions: {len(tally.exceptions)}", *tally.exceptions, sep="\n")


if __name__ == "__main__":
    main()
