"""docs/reference/metrics.md explains what the code writes, and nothing else. Tests of real runs check it, too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from headrace.trainer.loss import PackedInputs, ce_loss, k2_loss, k3_loss, ref_kl_loss
from headrace.trainer.losses import policy_loss
from tests.observe.metrics_page import ANY, documented, first_cells, names_in, undocumented

SOURCE = Path(__file__).parents[2] / "src" / "headrace"
WRITERS = [file for room in ("trainer", "orchestrator") for file in sorted((SOURCE / room).rglob("*.py"))]
WRITERS.append(SOURCE / "inference" / "latents.py")
"""Algorithms have a table of their own, in docs/reference/algorithms.md."""
SERVED = {name for name in documented() if name.startswith("headrace_")}
"""Names for Prometheus, which have a test of their own."""
NEVER_RECORDED = {"cancelled"}
"""The reason of what a run that is stopped leaves behind: nothing is recorded after that."""


@cache
def texts_of(file: Path) -> frozenset[str]:
    """Texts of a module that may be names or parts of them, with `{}` for what is filled in.

    `spread` makes three of its first argument.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "spread":
            found |= {f"{text_of(node.args[0])}/{end}" for end in ("mean", "max", "min")}
        elif (text := text_of(node)) is not None:
            found.add(text)
    return frozenset(text for text in found if re.fullmatch(r"[\w@{}]+(/[\w@{}]+)*", text) and text != ANY)


def text_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or ANY for part in node.values)
    return None


def filled(text: str, part: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(re.escape(ANY), part))


def made_by(file: Path, names: set[str]) -> set[str]:
    """Of the names, those that are a text of the module, with other texts of it filled in where it leaves room."""
    texts = texts_of(file)
    made = names & texts
    for text in texts:
        pattern = filled(text, "(.+?)")
        matches = {name: match for name in names - made if ANY in text and (match := pattern.fullmatch(name))}
        made |= {name for name, match in matches.items() if texts.issuperset({*match.groups()} - {ANY})}
    return made


def test_every_name_of_the_page_is_written_somewhere():
    names = {name for _, cell in first_cells("name") for name in names_in(cell)}
    assert names - SERVED - {name for file in WRITERS for name in made_by(file, names)} == set()


def test_every_text_in_the_code_that_begins_like_a_metric_is_on_the_page():
    beginnings = tuple({name.partition("/")[0] + "/" for name in documented() if "/" in name})
    texts = {text for file in WRITERS for text in texts_of(file) if text.startswith(beginnings)}
    spreads = {text for text in texts if f"{text}/mean" in texts}
    whole = {text for text in texts - spreads if not text.endswith(ANY)}  # the rest only real runs can tell
    assert len(whole) > 40
    assert {text for text in whole if not is_documented(text) and not is_documented(f"eval/{ANY}/{text}")} == set()


def is_documented(name: str) -> bool:
    return not undocumented([{name: 0.0}]) or any(filled(name, "[^/]+").fullmatch(known) for known in documented())


def losses() -> Iterator[dict[str, object]]:
    one = torch.ones(2)
    inputs = PackedInputs(-one, -one, -one, one, one.bool(), one, sequences=torch.zeros(2, dtype=torch.int64))
    for kind in ("default", "ipo", "ppo_clip", "gspo", "cispo", "icepop", "reinforce"):
        yield policy_loss(kind)(inputs).metrics
    yield ce_loss(inputs).metrics
    yield ref_kl_loss(inputs).metrics
    yield from (loss(inputs).metrics for loss in (k2_loss, k3_loss))


def test_the_losses_of_the_page_are_what_losses_and_the_step_report():
    reported = {name for metrics in losses() for name in metrics} | {"loss", "entropy"}
    assert {name for heading, cell in first_cells("name") if heading == "Losses" for name in names_in(cell)} == reported


def test_what_the_page_tells_people_to_look_at_is_explained_below():
    assert undocumented([dict.fromkeys(names_in(cell), 0.0) for _, cell in first_cells("look at")]) == []


def test_the_reasons_are_those_that_the_code_gives():
    source = "".join(file.read_text() for file in SOURCE.rglob("*.py") if "probe" not in file.parts)  # of no run
    listed = {name for _, cell in first_cells("reason") for name in names_in(cell)}
    given = set(re.findall(r"(?:RolloutError|EpisodeError)\(\s*\"(\w+)\"", source))
    assert {reason for reason in listed if f'"{reason}"' not in source} == set()
    assert given - NEVER_RECORDED - listed == set()
