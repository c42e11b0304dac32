"""A report as a page: Markdown with its pictures beside it, and HTML with its pictures inside, in one file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from headrace.tools.compare.view import Cells, markdown
from headrace.tools.sweep.charts import Chart

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; }
svg { max-width: 100%; height: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid rgb(125 133 144 / 25%); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { overflow-x: auto; }
"""


class Section(NamedTuple):
    title: str
    charts: Sequence[Chart] = ()
    cells: Cells | None = None
    notes: Sequence[str] = ()


def as_markdown(title: str, introduction: str, sections: Sequence[Section]) -> str:
    lines = [f"# {title}", "", introduction, ""]
    for section in sections:
        lines += [f"## {section.title}", ""]
        for chart in section.charts:
            lines += [f"![{chart.title}]({chart.file})", ""]
        if section.cells:
            lines += [*markdown(section.cells), ""]
        if section.notes:
            lines += [*(f"- {_indented(note)}" for note in section.notes), ""]
    return "\n".join(lines)


def _indented(note: str) -> str:
    """A note of several lines, as what follows its first belongs to it."""
    first, *rest = note.splitlines()
    return "\n".join([first, *([""] if rest else []), *(f"  {line}" for line in rest)])


def as_html(title: str, introduction: str, sections: Sequence[Section]) -> str:
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(introduction)}</p>",
    ]
    for section in sections:
        parts.append(f"<h2>{escape(section.title)}</h2>")
        parts += [f"<figure>{chart.svg}</figure>" for chart in section.charts]
        parts += [_table(section.cells)] if section.cells else []
        parts += ["<ul>", *map(_note, section.notes), "</ul>"] if section.notes else []
    return "\n".join([*parts, "</body></html>", ""])


def _table(cells: Cells) -> str:
    titles, *rows = cells
    head = "".join(f"<th>{escape(cell)}</th>" for cell in titles)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _note(note: str) -> str:
    first, *rest = note.splitlines()
    block = f"<pre>{escape(chr(10).join(rest))}</pre>" if rest else ""
    return f"<li>{escape(first)}{block}</li>"
