"""Generated parts of docs/reference (`make docs`): config.md, and the table of algorithms in algorithms.md.

config.md has every key of every run file, as `headrace config --explain` explains it.

A section that occurs in several places is described once, at the first; other places link to it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from headrace.config.algorithms import ALGORITHMS
from headrace.config.base import sections_at
from headrace.config.dpo import DpoConfig
from headrace.config.sft import SftConfig
from headrace.runfile.explain import children, explain, kinds_of
from headrace.runfile.hackable.sections import HackableConfig
from headrace.runfile.run import RunConfig

PREFACE = """\
# Every key

`make docs` writes this page from the sections of a run file in the source. `headrace config --explain KEY` prints the
same text, and what a key is in your own file ([comparing.md](../how-to/comparing.md)). The [README](../../README.md)
shows how to begin. Any key can be given on the command line, as `--trainer.optim.lr 1e-4`.
"""

FILES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("headrace rl", "A run of three processes. `[[...]]` are lists: such a section may come several times.", RunConfig),
    ("headrace sft", "Supervised training: [sft.md](../how-to/sft.md).", SftConfig),
    ("headrace dpo", "Training on preference pairs: [dpo.md](../how-to/dpo.md).", DpoConfig),
    (
        "headrace rl, in short",
        "A YAML file with data, rewards and an objective, which is translated into a run file: "
        "[hacking.md](../how-to/hacking.md). The sections above may stand beside these. What goes into `kwargs` "
        "depends on the plugin; `headrace config --explain` prints it.",
        HackableConfig,
    ),
)

BEGIN, END = "<!-- written by `make docs` -->", "<!-- end -->"
ROOT = "the top of the file"
Sections = tuple[type[BaseModel], ...]


def reference() -> str:
    """Return the page with every key of every run file."""
    headings: dict[Sections, str] = {}
    parts = [PREFACE]
    for command, words, root in FILES:
        parts.append(f"## {command}\n\n{words}\n")
        parts += _File(command, root, headings).parts()
    return "\n".join(parts)


class _File:
    """The part of the page for one kind of file; `headings` has the heading of each section so far."""

    def __init__(self, command: str, root: type[BaseModel], headings: dict[Sections, str]) -> None:
        self._command, self._root, self._headings = command, root, headings

    def parts(self, key: str = "") -> Iterator[str]:
        """Yield the section at a key, then those within it that are not on the page yet."""
        keys = children(self._root, key) if key else list(self._root.model_fields)
        inner = [k for k in keys if self._sections(k)]
        new = [k for k in inner if self._headings.setdefault(self._sections(k), self._heading(k)) == self._heading(k)]
        sections = self._sections(key) if key else ()
        words = " ".join((sections[0].__doc__ or "").split()) if len(sections) == 1 else ""
        repeated = not words or words == explain(self._root, key)[0].sentence  # in the row that links to the section
        rows = [row for k in keys if not k.endswith(".type") for row in self._rows(k)]
        table = ["| key | takes | default | |", "|---|---|---|---|", *rows, ""] if rows else []
        yield "\n".join(
            [f"### {self._heading(key)}", "", *([] if repeated else [words, ""]), *self._types(key), *table]
        )
        for child in new:
            yield from self.parts(child)

    def _sections(self, key: str) -> Sections:
        return tuple(sections_at(self._root, key.split(".")))

    def _heading(self, key: str) -> str:
        if not key:
            return f"{self._command}: {ROOT}"
        if self._root is HackableConfig:
            return f"{self._command}: `{key}`"
        shape = explain(self._root, key)[0].type
        name = f"{key}.NAME" if shape.startswith("table of tables") else key
        shown = f"`[[{name}]]`" if shape.startswith("list of") else f"`[{name}]`"
        return shown if self._root is RunConfig else f"{self._command}: {shown}"

    def _types(self, key: str) -> list[str]:
        """List the values of `type` with their descriptions."""
        kinds = kinds_of(self._root, key) if key else {}
        if not kinds:
            return []
        alike: dict[str, list[str]] = {}
        for kind, sentence in kinds.items():
            alike.setdefault(sentence, []).append(f"`{kind}`")
        default = explain(self._root, f"{key}.type")[0].default
        chosen = "" if default.startswith("none") else f", {_code(default)} unless set"
        return [f"By `type`{chosen}:", "", *(f"- {', '.join(names)}: {text}" for text, names in alike.items()), ""]

    def _rows(self, key: str) -> Iterator[str]:
        """Yield one row, or several if the key differs by the type of its section."""
        section, _, name = key.rpartition(".")
        entries = explain(self._root, key)
        all_kinds = set(kinds_of(self._root, section)) if section else set()
        heading = self._headings.get(self._sections(key))
        shown = f"[`{name}`](#{anchor(heading)})" if heading else f"`{name}`"
        for entry in entries:
            few = set(entry.kinds) != all_kinds
            whose = f"{', '.join(f'`{kind}`' for kind in entry.kinds)}: " if few else ""
            _, of_keys, kind = entry.default.partition("the defaults of its keys")
            default = _code(
                kind.removeprefix(", ") if of_keys else entry.default
            )  # empty if only its keys have defaults
            default = "must be set" if entry.default.startswith("none") else default
            cells = (shown, re.sub(",? or unset$", "", entry.type), default, whose + entry.sentence)
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(value: str) -> str:
    return value if value in ("", "unset") else f"`{value}`"


def anchor(heading: str) -> str:
    """Return the anchor of a heading, by GitHub's rule."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def algorithms_table() -> str:
    """Return the table of the shipped algorithms, made of their declarations."""
    head = ["| type | loss | credit of rollout i, with reward r_i in a group of n |", "|---|---|---|"]
    sections = ((name, ALGORITHMS.section(name)) for name in ALGORITHMS.names)
    return "\n".join([*head, *(f"| `{name}` | {section.LOSS} | {section.CREDIT} |" for name, section in sections)])


def with_algorithms_table(page: str) -> str:
    """Return algorithms.md with its table as the declarations have it."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{algorithms_table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    docs = Path(sys.argv[1])
    (docs / "config.md").write_text(reference())
    (docs / "algorithms.md").write_text(with_algorithms_table((docs / "algorithms.md").read_text()))
