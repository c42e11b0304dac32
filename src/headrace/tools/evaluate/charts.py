"""The pictures of an evaluation: accuracy by model, accuracy against length with its frontier, and measures over steps.

Every name has a row or a place of its own, so that no two lie on each other, however many models there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.observe.plot import (
    COLORS,
    SPACING,
    WIDTH,
    Box,
    Frame,
    axes,
    band,
    document,
    dots,
    rule,
    same_digits,
    spread,
    stroke,
    text,
    ticks,
)
from headrace.tools.evaluate.estimates import Estimate

CHARACTER = 7.2
"""Pixels that a character takes, on average and at most about."""
LONGEST = 40
"""Characters of a name that are shown."""
ROW = 24
MARGIN = 20
TOP, UNDER = 44, 50
TALL = 320
"""Height of the chart of lengths, unless more models need more."""


def accuracy_chart(
    title: str, models: Sequence[tuple[str, Estimate]], what: str = "accuracy, with its 95% interval"
) -> str:
    """A row per model: its accuracy or mean reward, and the interval around it; `what` says which that is."""
    left = MARGIN + CHARACTER * max((len(_shown(name)) for name, _ in models), default=0) + 12
    height = TOP + ROW * len(models) + UNDER
    x_ticks = ticks(min([0.0, *(each.low for _, each in models)]), max([1.0, *(each.high for _, each in models)]), 5)
    frame = Frame(x_ticks[0], x_ticks[-1], 0.0, 1.0, Box(left, TOP, WIDTH - 70, height - UNDER))
    body = axes(frame, x_ticks, (), what, "")
    for number, (name, accuracy) in enumerate(models):
        y = TOP + ROW * (number + 0.5)
        color = COLORS[number % len(COLORS)]
        body += [
            text(left - 12, y + 4.5, _shown(name), "end"),
            f'<path d="M{frame.x(accuracy.low)},{y:.1f}H{frame.x(accuracy.high)}" {stroke(color, 2)}/>',
            f'<circle cx="{frame.x(accuracy.value)}" cy="{y:.1f}" r="4.5" fill="{color}"/>',
            text(WIDTH - 60, y + 4.5, f"{accuracy.value:.3f}", color=color),
        ]
    return document(title, WIDTH, height, MARGIN, body)


def length_chart(
    title: str,
    what: str,
    models: Sequence[tuple[str, Estimate, Estimate]],
    bars: str = "95% intervals",
    score: str = "accuracy",
) -> str:
    """`models` are names, lengths and scores; `what` and `score` name the axes; `bars` says what the error bars are.

    Names are beside the chart, each with a line to its point. The frontier joins the models that none beats in both.
    """
    right = WIDTH - MARGIN - 24 - CHARACTER * max((len(_shown(name)) for name, _, _ in models), default=0)
    top = TOP + ROW
    height = top + max(TALL, SPACING * (len(models) + 1)) + UNDER
    x_ticks = _range([length for _, length, _ in models], least=1.0)
    y_ticks = _range([accuracy for _, _, accuracy in models], least=0.1)
    frame = Frame(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1], Box(60, top, right, height - UNDER))
    body = axes(frame, x_ticks, y_ticks, what, score)
    edge = frontier([(length.value, accuracy.value) for _, length, accuracy in models])
    body += [rule(frame.path(edge), dashes="5 4", width=1.5)] if edge else []
    order = sorted(range(len(models)), key=lambda number: (-models[number][2].value, models[number][1].value))
    places = spread([float(frame.y(models[number][2].value)) for number in order], top, height - UNDER)
    for number, place in zip(order, places, strict=True):
        name, length, accuracy = models[number]
        x, y, color = frame.x(length.value), frame.y(accuracy.value), COLORS[number % len(COLORS)]
        body += [
            f'<path d="M{x},{y}L{right + 16:.1f},{place:.1f}" {stroke(color, 0.75)} stroke-opacity="0.6"/>',
            f'<path d="M{frame.x(length.low)},{y}H{frame.x(length.high)}" {stroke(color, 1.5)}/>',
            f'<path d="M{x},{frame.y(accuracy.low)}V{frame.y(accuracy.high)}" {stroke(color, 1.5)}/>',
            f'<circle cx="{x}" cy="{y}" r="4.5" fill="{color}"/>',
            text(right + 20, place + 4.5, _shown(name), color=color),
        ]
    caption = f"bars: {bars}; dashed: the frontier, which no model beats in both"
    return document(title, WIDTH, height, MARGIN, body, caption)


def curve_chart(title: str, what: str, curves: Mapping[str, Sequence[tuple[int, Estimate]]]) -> str:
    """A line per run over its steps, in the band of its intervals. Names are beside the chart, near the last values."""
    ends = same_digits([points[-1][1].value for points in curves.values()])
    names = {name: f"{_shown(name)} {end}" for name, end in zip(curves, ends, strict=True)}
    right = WIDTH - MARGIN - 24 - CHARACTER * max(map(len, names.values()))
    top = TOP + ROW
    height = top + max(TALL, SPACING * (len(curves) + 1)) + UNDER
    steps = [step for points in curves.values() for step, _ in points]
    x_ticks = ticks(min(steps), max(steps), 5, whole=True)
    y_ticks = _range([estimate for points in curves.values() for _, estimate in points], least=0.1)
    frame = Frame(x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1], Box(60, top, right, height - UNDER))
    body = axes(frame, x_ticks, y_ticks, "optimizer step", what)
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(curves)}
    for name, points in curves.items():
        body += _curve(frame, points, colors[name])
    order = sorted(curves, key=lambda name: -curves[name][-1][1].value)
    places = spread([float(frame.y(curves[name][-1][1].value)) for name in order], top, height - UNDER)
    for name, place in zip(order, places, strict=True):
        step, last = curves[name][-1]
        line = f"M{frame.x(step)},{frame.y(last.value)}L{right + 16:.1f},{place:.1f}"
        body.append(f'<path d="{line}" {stroke(colors[name], 0.75)} stroke-opacity="0.6"/>')
        body.append(text(right + 20, place + 4.5, names[name], color=colors[name]))
    return document(title, WIDTH, height, MARGIN, body, "points: evaluated checkpoints; band: 95% interval")


def _curve(frame: Frame, points: Sequence[tuple[int, Estimate]], color: str) -> list[str]:
    """A band from the low to the high ends, the line of the values, and a dot at each."""
    values = [(step, each.value) for step, each in points]
    return [
        band(frame, [(step, each.high) for step, each in points], [(step, each.low) for step, each in points], color),
        f'<path d="{frame.path(values)}" {stroke(color, 2.5)}/>',
        *dots(frame, values, color),
    ]


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (length, accuracy) those than which no shorter or equally short one is as accurate, by length."""
    best, edge = -math.inf, []
    for length, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if accuracy > best:
            edge.append((length, accuracy))
            best = accuracy
    return edge


def _range(estimates: Sequence[Estimate], least: float) -> list[float]:
    """Ticks around all intervals, not from 0: models of one kind are close to each other."""
    low, high = min(each.low for each in estimates), max(each.high for each in estimates)
    return ticks(low, max(high, low + least), 5)


def _shown(name: str) -> str:
    """A long name by its end, which tells models of one folder apart."""
    return name if len(name) <= LONGEST else f"…{name[-LONGEST + 1 :]}"
