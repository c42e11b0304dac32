"""What a check found, and how it is shown."""

from __future__ import annotations

from typing import Literal

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Kind = Literal["holds", "fails", "does not apply", "noted"]
COLOURS: dict[Kind, str] = {"holds": "green", "fails": "red", "does not apply": "dim", "noted": "cyan"}


class Verdict(msgspec.Struct, frozen=True):
    """`detail` says what was seen, or why it does not apply."""

    kind: Kind
    detail: str = ""


class Row(msgspec.Struct, frozen=True):
    check: str
    says: str
    verdict: Verdict


class Report(msgspec.Struct, frozen=True):
    algorithm: str
    cases: int
    rows: list[Row]

    @property
    def passed(self) -> bool:
        return all(row.verdict.kind != "fails" for row in self.rows)


def view(report: Report) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a long path must not be cut short
    for row in report.rows:
        verdict = Text(row.verdict.kind, COLOURS[row.verdict.kind])
        table.add_row(Text(row.check), verdict, _told(row))
    failed = [row.check for row in report.rows if row.verdict.kind == "fails"]
    end = Text(f"does not hold: {', '.join(failed)}", "red") if failed else Text("all that applies holds", "green")
    return Group(Text(f"{report.algorithm}, on {report.cases} groups"), Text(), table, Text(), end)


def _told(row: Row) -> Text:
    """What the check says, and what was seen; of one that does not apply, why."""
    seen = _printable(row.verdict.detail)
    if row.verdict.kind == "does not apply":
        return Text(seen, "dim")
    if row.verdict.kind == "holds":
        return Text(f"{row.says} ({seen})" if seen else row.says)
    return Text.assemble(row.says, "\n", (seen, "red" if row.verdict.kind == "fails" else "dim"))


def _printable(text: str) -> str:
    """What a terminal would obey rather than show, escaped."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
