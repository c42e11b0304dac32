"""Two ways to credit the same rollouts as one picture: advantages against each other, and shares of the gradient.

Left out on purpose: time. It shows the chosen steps as one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from headrace.observe.chart import HELD_OUT, TRAIN, Box, Plot, document, rule, text, ticks
from headrace.tools.rescore.credit_comparison import CAPTION, Comparison, Share

THEN, NOW = TRAIN, HELD_OUT
WIDTH, MARGIN, GAP = 820, 24, 40
PANEL = (WIDTH - 2 * MARGIN - GAP) / 2
TOP = 114
"""Where the panels begin."""
LEAST = 240
"""The least height of the panel of advantages."""
BAR, PAIR = 11, 34
"""The height of a bar, and of a pair with the space around it."""
NAME, NUMBER = 96, 52
"""Width of a bar's name, and of its number."""
CELLS = 32
"""Cells along each axis into which points are gathered."""
LARGEST = 11.0
"""Radius of the circle for the fullest cell."""


def rescore_chart(title: str, labels: tuple[str, str], comparison: Comparison, advantages: np.ndarray) -> str:
    """`labels` name the two ways, then and now; `advantages` has a row per rollout."""
    left, right = MARGIN, MARGIN + PANEL + GAP
    body = _legend(labels)
    y = float(TOP)
    for name, shares in comparison.shares.items():
        body += _bars(right, y, f"share of the gradient by {name}", shares)
        y += 44 + PAIR * len(shares)
    height = max(LEAST, y - TOP - 82)
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
    """A pair of bars for each, with a line where its share of the sampled tokens is."""
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
    """A circle for the rollouts of each cell, its area by how many they are."""
    known = advantages[~np.isnan(advantages).any(axis=1)]
    title = text(left, top + 10, "mean advantage of a rollout: now (vertical) over then")
    if not len(known):
        return [title, text(left, top + 40, "one side has no advantages: it trains without them", size=12)]
    lows, highs = np.minimum(known.min(axis=0), 0.0), np.maximum(known.max(axis=0), 0.0)
    highs = np.where(highs - lows > 0, highs, 1.0)  # each axis has its own range, which includes zero
    x_ticks, y_ticks = (ticks(float(low), float(high), 5) for low, high in zip(lows, highs, strict=True))
    box = Box(left + 44, top + 28, left + PANEL - 16, top + 28 + height)
    plot = Plot((x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]), box)
    plot.axes(x_ticks, y_ticks, "then (dashed: no change)", "")
    low, high = max(x_ticks[0], y_ticks[0]), min(x_ticks[-1], y_ticks[-1])
    plot.parts.append(rule(plot.path([(low, low), (high, high)]), dashes="4 3"))
    cells, counts = _gather(known)
    for (then, now), count in zip(cells, counts, strict=True):
        radius = max(1.5, LARGEST * float(np.sqrt(count / counts.max())))
        position = f'cx="{plot.x(then)}" cy="{plot.y(now)}"'
        plot.parts.append(f'<circle {position} r="{radius:.1f}" fill="{NOW}" fill-opacity="0.55"/>')
    return [title, *plot.parts]


def _gather(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the points in each cell that has any, and how many they are, the fullest first."""
    low, span = points.min(axis=0), np.ptp(points, axis=0)
    grid = np.floor((points - low) / np.where(span > 0, span, 1.0) * (CELLS - 1e-9)).astype(int)
    _, cell, counts = np.unique(grid, axis=0, return_inverse=True, return_counts=True)
    sums = np.zeros((len(counts), 2))
    np.add.at(sums, cell.reshape(-1), points)
    order = np.argsort(-counts, kind="stable")
    return (sums / counts[:, None])[order], counts[order]
