"""Output of `headrace rescore`: tables for the terminal, and a chart of advantages and shares of the gradient.

Left out on purpose: time. The chosen steps are shown as one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.observe.chart import HELD_OUT, TRAIN, Box, Plot, document, rule, text, ticks
from headrace.observe.console import plain_table
from headrace.tools.rescore.comparison import CAPTION, QUANTILES, Comparison, Share

THEN, NOW = TRAIN, HELD_OUT
WIDTH, MARGIN, GAP = 820, 24, 40
PANEL = (WIDTH - 2 * MARGIN - GAP) / 2
TOP = 114
"""The y of the panels."""
MIN_SCATTER_HEIGHT = 240
BAR, PAIR = 11, 34
"""The height of a bar, and of a pair of bars with the space around it."""
NAME, NUMBER = 96, 52
"""Width of a bar's name, and of its number."""
CELLS = 32
"""Cells along each axis in which points are combined."""
MAX_RADIUS = 11.0
"""Radius of the circle for the fullest cell."""


def comparison_tables(comparison: Comparison) -> RenderableType:
    signal, shares = _credit_table(comparison), _share_table(comparison)
    return Group(signal, Text(), shares, Text(textwrap.fill(CAPTION, 100), style="dim"))


def _credit_table(comparison: Comparison) -> Table:
    table = plain_table("credit", "then", "now")
    sides = comparison.then, comparison.now
    table.add_row("groups with a signal", *(_part(side.groups_with_signal, comparison.groups) for side in sides))
    table.add_row("rollouts that train", *(_part(side.rollouts_that_train, comparison.rollouts) for side in sides))
    table.add_row("mean |A| of a sampled token", *(_number(side.mean_abs_advantage) for side in sides))
    for name in QUANTILES:
        table.add_row(f"A of a rollout, {name}", *(_number(side.advantages.get(name), "{:+.3f}") for side in sides))
    components = dict.fromkeys(name for side in sides for name in side.components)
    for component in components if len(components) > 1 else ():
        shares = (side.components.get(component) for side in sides)
        table.add_row(f"gradient by {component}", *(_number(share, "{:.1%}") for share in shares))
    table.add_row("correlation of A", "", _number(comparison.correlation))
    table.add_row("same sign of A", "", _number(comparison.same_sign, "{:.1%}"))
    table.add_row("rollouts that train on one side alone", "", f"{comparison.changed_sides:,}")
    return table


def _share_table(comparison: Comparison) -> Table:
    table = plain_table("share of the gradient", "rollouts", "tokens", "then", "now", "change")
    for title, shares in comparison.shares.items():
        table.add_row(Text(title, style="dim"))
        for share in shares:
            parts = (f"{value:.1%}" for value in (share.rollouts, share.tokens, share.then, share.now))
            change = f"{round(100 * (share.now - share.then), 1) + 0.0:+.1f}"
            table.add_row(*map(Text, (f"  {share.name}", *parts, change)))
    return table


def _part(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.1%})" if total else "0"


def _number(value: float | None, form: str = "{:.3f}") -> str:
    return "none" if value is None else form.format(value)


def rescore_chart(title: str, labels: tuple[str, str], comparison: Comparison, advantages: np.ndarray) -> str:
    """Draw a comparison; `labels` are the algorithms then and now, `advantages` has a row per rollout."""
    left, right = MARGIN, MARGIN + PANEL + GAP
    body = _legend(labels)
    y = float(TOP)
    for name, shares in comparison.shares.items():
        body += _bars(right, y, f"share of the gradient by {name}", shares)
        y += 44 + PAIR * len(shares)
    height = max(MIN_SCATTER_HEIGHT, y - TOP - 82)
    body += _scatter(left, TOP, height, advantages)
    bottom = TOP + height + 96
    lines = textwrap.wrap(CAPTION, 124)
    body += [text(left, bottom + 16 * number, line, size=12) for number, line in enumerate(lines)]
    return document(title, WIDTH, bottom + 16 * len(lines) + 4, left, body)


def _legend(labels: tuple[str, str]) -> list[str]:
    parts = []
    for number, (name, label, color) in enumerate(zip(("then", "now"), labels, (THEN, NOW), strict=True)):
        y = 46 + 18 * number
        parts.append(f'<rect x="{MARGIN}" y="{y - 10}" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(text(MARGIN + 20, y + 0.5, f"{name}: {textwrap.shorten(label, 100, placeholder=' ...')}"))
    parts.append(rule(f"M{MARGIN + 6},71v14", dashes="3 2"))
    return [*parts, text(MARGIN + 20, 82.5, "share of the sampled tokens")]


def _bars(left: float, top: float, title: str, shares: Sequence[Share]) -> list[str]:
    """Draw a pair of bars for each share, with a line at its share of the sampled tokens."""
    parts = [text(left, top + 10, title)]
    start = left + NAME
    span = (PANEL - NAME - NUMBER) / max((max(s.then, s.now, s.tokens) for s in shares if s.rollouts), default=1.0)
    for number, share in enumerate(shares):
        y = top + 28 + PAIR * number
        parts.append(text(start - 8, y + BAR + 4, textwrap.shorten(share.name, 16, placeholder="..."), "end", size=12))
        for row, (value, color) in enumerate(((share.then, THEN), (share.now, NOW))):
            at, width = y + row * (BAR + 1), value * span
            parts.append(f'<rect x="{start:.1f}" y="{at:.1f}" width="{width:.1f}" height="{BAR}" fill="{color}"/>')
            parts.append(text(left + PANEL, at + 9.5, f"{value:.1%}", "end", color, size=11))
        place = start + share.tokens * span
        parts.append(rule(f"M{place:.1f},{y - 3:.1f}v{2 * BAR + 7}", dashes="3 2"))
    return parts


def _scatter(left: float, top: float, height: float, advantages: np.ndarray) -> list[str]:
    """Draw a circle for the rollouts of each cell, with an area by their number."""
    points = advantages[~np.isnan(advantages).any(axis=1)]
    title = text(left, top + 10, "mean advantage of a rollout: now (vertical) over then")
    if not len(points):
        return [title, text(left, top + 40, "one side has no advantages: it trains without them", size=12)]
    lows, highs = np.minimum(points.min(axis=0), 0.0), np.maximum(points.max(axis=0), 0.0)
    highs = np.where(highs - lows > 0, highs, 1.0)  # each axis has its own range, which includes zero
    x_ticks, y_ticks = (ticks(float(low), float(high), 5) for low, high in zip(lows, highs, strict=True))
    box = Box(left + 44, top + 28, left + PANEL - 16, top + 28 + height)
    plot = Plot((x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]), box)
    plot.axes(x_ticks, y_ticks, "then (dashed: no change)", "")
    low, high = max(x_ticks[0], y_ticks[0]), min(x_ticks[-1], y_ticks[-1])
    plot.parts.append(rule(plot.path([(low, low), (high, high)]), dashes="4 3"))
    cells, counts = _combine_points(points)
    for (then, now), count in zip(cells, counts, strict=True):
        radius = max(1.5, MAX_RADIUS * float(np.sqrt(count / counts.max())))
        position = f'cx="{plot.x(then)}" cy="{plot.y(now)}"'
        plot.parts.append(f'<circle {position} r="{radius:.1f}" fill="{NOW}" fill-opacity="0.55"/>')
    return [title, *plot.parts]


def _combine_points(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of the points in each cell with any, and their number, the fullest cell first."""
    low, span = points.min(axis=0), np.ptp(points, axis=0)
    grid = np.floor((points - low) / np.where(span > 0, span, 1.0) * (CELLS - 1e-9)).astype(int)
    _, cell, counts = np.unique(grid, axis=0, return_inverse=True, return_counts=True)
    sums = np.zeros((len(counts), 2))
    np.add.at(sums, cell.reshape(-1), points)
    order = np.argsort(-counts, kind="stable")
    return (sums / counts[:, None])[order], counts[order]
