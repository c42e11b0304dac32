"""The results of the checks of an algorithm, and the table that shows them."""

from __future__ import annotations

from typing import Literal

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Kind = Literal["holds", "fails", "does not apply", "noted"]
COLOURS: dict[Kind, str] = {"holds": "green", "fails": "red", "does not apply": "dim", "noted": "cyan"}


class Verdict(msgspec.Struct, frozen=True):
    kind: Kind
    detail: str = ""
    """What was observed, or why the check does not apply."""


class CheckResult(msgspec.Struct, frozen=True):
    check: str
    description: str
    verdict: Verdict


class ConformanceReport(msgspec.Struct, frozen=True):
    algorithm: str
    cases: int
    checks: list[CheckResult]

    @property
    def passed(self) -> bool:
        return all(check.verdict.kind != "fails" for check in self.checks)


def render_report(report: ConformanceReport) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # do not cut long paths
    for result in report.checks:
        verdict = Text(result.verdict.kind, COLOURS[result.verdict.kind])
        table.add_row(Text(result.check), verdict, _describe(result))
    failed = [result.check for result in report.checks if result.verdict.kind == "fails"]
    end = Text(f"failed: {', '.join(failed)}", "red") if failed else Text("all checks that apply hold", "green")
    return Group(Text(f"{report.algorithm}, on {report.cases} groups"), Text(), table, Text(), end)


def _describe(result: CheckResult) -> Text:
    """Return the check's description and detail, with control characters escaped."""
    letters = (c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in result.verdict.detail)
    detail = "".join(letters)
    match result.verdict.kind:
        case "does not apply":
            return Text(detail, "dim")
        case "holds":
            return Text(f"{result.description} ({detail})" if detail else result.description)
        case kind:
            return Text.assemble(result.description, "\n", (detail, "red" if kind == "fails" else "dim"))
