"""Several runs side by side as SVG: one line per kind of run, the mean of its seeds, in the band that they span.

Seeds count where all of a kind have a value; of a kind whose seeds have no step in common the legend says so. Past as
many kinds as there are colours, lines are dashed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.observe.plot import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Frame,
    Points,
    axes,
    document,
    stroke,
    text,
    ticks,
)

COLORS = ("#f0883e", "#6cb6ff", "#3fb950", "#d2a8ff", "#e3b341", "#f778ba")
DASHES = ("", "9 5", "2 5", "12 4 2 4")
SPACING = 15
"""Between the last values of two lines."""
ROW = 20
"""Height of a row of the legend; where there are several, all are below the chart."""


def comparison_chart(title: str, curves: Mapping[str, Sequence[Points]], level: tuple[str, float] | None = None) -> str:
    """`curves` are the runs of each kind by its name; `level` is a value to compare with, drawn as a dashed line."""
    spreads = [_spread(runs) for runs in curves.values()]
    xs = [x for spread in spreads for x, _ in spread]
    values = [y for spread in spreads for _, several in spread for y in several] + ([level[1]] if level else [])
    last, low = max([1.0, *xs]), min([0.0, *values])
    high = max(values, default=low)
    y_ticks = ticks(low, high if high > low else low + 1.0, 5)
    frame = Frame(0.0, last, y_ticks[0], y_ticks[-1])
    body = axes(frame, ticks(0.0, last, 8, whole=True), y_ticks)
    for number, spread in enumerate(spreads):
        body += _band(frame, spread, number)
    body += _last_values(frame, spreads)
    names = [name if spread else f"{name} (no step in common)" for name, spread in zip(curves, spreads, strict=True)]
    legend, below = _legend(names)
    if level is not None:
        name, value = level
        y = frame.y(value)
        body.append(f'<path d="M{frame.x(0)},{y}H{frame.x(last)}" {stroke("#7d8590", 1.5)} stroke-dasharray="4 5"/>')
        body.append(text(float(frame.x(last)), float(y) - 6, name, "end"))
    return document(title, WIDTH, HEIGHT + below, LEFT, [*body, *legend])


def _spread(runs: Sequence[Points]) -> list[tuple[float, list[float]]]:
    """Where all runs have a value: what they have there."""
    by_x = [{x: y for x, y in run if math.isfinite(y)} for run in runs]
    shared = sorted(set.intersection(*(set(run) for run in by_x))) if by_x else []
    return [(x, [run[x] for run in by_x]) for x in shared]


def _band(frame: Frame, spread: Sequence[tuple[float, Sequence[float]]], number: int) -> list[str]:
    """The least, the mean, the most."""
    if not spread:
        return []
    above = [(x, max(values)) for x, values in spread]
    below = [(x, min(values)) for x, values in reversed(spread)]
    mean = [(x, sum(values) / len(values)) for x, values in spread]
    color = COLORS[number % len(COLORS)]
    return [
        f'<path d="{frame.path([*above, *below])}Z" fill="{color}" fill-opacity="0.15"/>',
        f'<path d="{frame.path(mean)}" {_line(number)}/>',
    ]


def _last_values(frame: Frame, spreads: Sequence[Sequence[tuple[float, Sequence[float]]]]) -> list[str]:
    """What each line came to, beside the chart, as far apart as it takes to be read."""
    ends = [(sum(spread[-1][1]) / len(spread[-1][1]), number) for number, spread in enumerate(spreads) if spread]
    ends.sort(reverse=True)
    places = spread([float(frame.y(value)) for value, _ in ends], TOP, HEIGHT - BOTTOM)
    return [
        text(WIDTH - RIGHT + 9, place + 4.5, f"{value:.3g}", color=COLORS[number % len(COLORS)])
        for (value, number), place in zip(ends, places, strict=True)
    ]


def spread(wanted: Sequence[float], top: float, bottom: float) -> list[float]:
    """Places for labels from top to bottom, near where they are wanted, `SPACING` apart; as far as they fit."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + SPACING if places else top))
    limit = bottom
    for number in reversed(range(len(places))):
        places[number] = min(places[number], limit)
        limit = places[number] - SPACING
    return places


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
    return stroke(COLORS[number % len(COLORS)], 2.5) + (f' stroke-dasharray="{dashes}"' if dashes else "")
