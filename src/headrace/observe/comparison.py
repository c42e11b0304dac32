"""Several runs side by side as SVG: one line per kind of run, the mean of its seeds, in the band that they span.

Seeds count where all of a kind have a value; of a kind whose seeds have no step in common the legend says so. Past as
many kinds as there are colours, lines are dashed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.observe.plot import (
    COLORS,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    Frame,
    Points,
    axes,
    band,
    document,
    dots,
    end_labels,
    rule,
    stroke,
    text,
    ticks,
)

DASHES = ("", "9 5", "2 5", "12 4 2 4")
MOST_DOTS = 30
"""Values of a line up to which each is marked, as evaluations are; a step has one on most lines."""
BAND = "line: mean over seeds; band: from the lowest to the highest seed"
ROW = 20
"""Height of a row of the legend; where there are several, all are below the chart."""


def comparison_chart(
    title: str,
    curves: Mapping[str, Sequence[Points]],
    level: tuple[str, float] | None = None,
    what: str = "reward",
    over: str = "optimizer step",
) -> str:
    """`curves` are the runs of each kind by its name; `level` is a value to compare with, drawn as a dashed line.

    `what` is the label of the values, `over` that of the other axis.
    """
    spreads = [_spread(runs) for runs in curves.values()]
    xs = [x for spread in spreads for x, _ in spread]
    values = [y for spread in spreads for _, several in spread for y in several] + ([level[1]] if level else [])
    last, low = max([1.0, *xs]), min([0.0, *values])
    high = max(values, default=low)
    y_ticks = ticks(low, high if high > low else low + 1.0, 5)
    frame = Frame(0.0, last, y_ticks[0], y_ticks[-1])
    body = axes(frame, ticks(0.0, last, 8, whole=True), y_ticks, over, what)
    for number, spread in enumerate(spreads):
        body += _line_in_band(frame, spread, number)
    ends = [(_mean(spread[-1][1]), _color(number)) for number, spread in enumerate(spreads) if spread]
    body += end_labels(frame, ends)
    names = [name if spread else f"{name} (no step in common)" for name, spread in zip(curves, spreads, strict=True)]
    legend, below = _legend(names)
    if level is not None:
        name, value = level
        y = frame.y(value)
        body.append(rule(f"M{frame.x(0)},{y}H{frame.x(last)}", dashes="4 5", width=1.5))
        body.append(text(float(frame.x(last)), float(y) - 6, name, "end"))
    several = any(len(runs) > 1 for runs in curves.values())
    return document(title, WIDTH, HEIGHT + below, LEFT, [*body, *legend], BAND if several else "")


def _spread(runs: Sequence[Points]) -> list[tuple[float, list[float]]]:
    """Where all runs have a value: what they have there."""
    by_x = [{x: y for x, y in run if math.isfinite(y)} for run in runs]
    shared = sorted(set.intersection(*(set(run) for run in by_x))) if by_x else []
    return [(x, [run[x] for run in by_x]) for x in shared]


def _line_in_band(frame: Frame, spread: Sequence[tuple[float, Sequence[float]]], number: int) -> list[str]:
    """The mean, in the band from the least to the most."""
    if not spread:
        return []
    above = [(x, max(values)) for x, values in spread]
    below = [(x, min(values)) for x, values in spread]
    mean = [(x, _mean(values)) for x, values in spread]
    color = _color(number)
    marks = dots(frame, mean, color) if len(mean) <= MOST_DOTS else []
    return [band(frame, above, below, color), f'<path d="{frame.path(mean)}" {_line(number)}/>', *marks]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _legend(names: Sequence[str]) -> tuple[list[str], int]:
    """Its parts, and the height that they take below the chart."""
    places: list[tuple[float, int]] = []
    x, row = float(LEFT), 0
    for name in names:
        width = 44 + 7 * len(name)
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, row = float(LEFT), row + 1
        places.append((x, row))
        x += width
    first = HEIGHT + ROW - 10 if row else 42
    parts: list[str] = []
    for number, (name, (x, row_of_it)) in enumerate(zip(names, places, strict=True)):
        y = first + ROW * row_of_it
        parts.append(f'<path d="M{x},{y}h22" {_line(number)}/>')
        parts.append(text(x + 28, y + 4.5, name))
    return parts, ROW * (row + 1) if row else 0


def _line(number: int) -> str:
    dashes = DASHES[number // len(COLORS) % len(DASHES)]
    return stroke(_color(number), 2.5) + (f' stroke-dasharray="{dashes}"' if dashes else "")
