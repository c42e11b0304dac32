"""Two ways to credit the same rollouts, as tables for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.tools.rescore.credit_comparison import CAPTION, QUANTILES, Comparison, Share, Side


def view(comparison: Comparison) -> RenderableType:
    """What differs, and by how much."""
    return Group(_signal(comparison), Text(), _shares(comparison), Text(textwrap.fill(CAPTION, 100), style="dim"))


def _signal(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("credit", no_wrap=True)
    for name in ("then", "now"):
        table.add_column(name, justify="right", no_wrap=True)
    sides = comparison.then, comparison.now
    table.add_row("groups with a signal", *(_part(side.groups_with_signal, comparison.groups) for side in sides))
    table.add_row("rollouts that train", *(_part(side.rollouts_that_train, comparison.rollouts) for side in sides))
    table.add_row("mean |A| of a sampled token", *(_number(side.mean_abs_advantage) for side in sides))
    for name in QUANTILES:
        table.add_row(f"A of a rollout, {name}", *(_number(side.advantages.get(name), "{:+.3f}") for side in sides))
    for component in _components(sides):
        shares = (side.components.get(component) for side in sides)
        table.add_row(f"gradient by {component}", *(_number(share, "{:.1%}") for share in shares))
    table.add_row("correlation of A", "", _number(comparison.correlation))
    table.add_row("same sign of A", "", _number(comparison.same_sign, "{:.1%}"))
    table.add_row("rollouts that train on one side alone", "", f"{comparison.changed_sides:,}")
    return table


def _components(sides: Sequence[Side]) -> list[str]:
    """Where there is one alone, there is nothing to tell."""
    found = list(dict.fromkeys(name for side in sides for name in side.components))
    return found if len(found) > 1 else []


def _shares(comparison: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("share of the gradient", no_wrap=True)
    for name in ("rollouts", "tokens", "then", "now", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for title, shares in comparison.shares.items():
        table.add_row(Text(title, style="dim"))
        for share in shares:
            table.add_row(*_cells(share))
    return table


def _cells(share: Share) -> list[Text]:
    parts = (f"{value:.1%}" for value in (share.rollouts, share.tokens, share.then, share.now))
    return [Text(f"  {share.name}"), *map(Text, parts), Text(f"{round(100 * (share.now - share.then), 1) + 0.0:+.1f}")]


def _part(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.1%})" if total else "0"


def _number(value: float | None, form: str = "{:.3f}") -> str:
    return "none" if value is None else form.format(value)
