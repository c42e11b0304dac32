"""The drawing of every plot, as SVG text: pure, no dependency; and the reward chart of a run.

What is drawn is a small part of SVG that other programs convert as it is: paths of straight lines, circles, rectangles
and text, with colours of six digits and opacity as an attribute. A picture has a background of its own, light or dark
as the viewer prefers, and colours that are legible on both.

Left out on purpose: everything that these charts do not need (log axes, interaction).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 720, 356
LEFT, RIGHT, TOP, BOTTOM = 56, 62, 80, 50
PAPER, DARK_PAPER = "#ffffff", "#0d1117"
TEXT, DARK_TEXT = "#3d444d", "#c9d1d9"
COLORS = ("#d9650a", "#2f81f7", "#1f9d4d", "#a05cf0", "#b07c00", "#d6409f")
"""Of series. Each has a contrast of 3 or more with both papers."""
HELD_OUT, TRAIN = COLORS[:2]
SPACING = 15
"""Between two labels below each other."""
DARK_STYLE = (
    f"@media (prefers-color-scheme: dark) {{ .hr-paper {{ fill: {DARK_PAPER} }} .hr-text {{ fill: {DARK_TEXT} }} "
    f".hr-line {{ stroke: {DARK_TEXT} }} }}"
)


def reward_chart(title: str, train: Points, held_out: Points) -> str:
    """Train reward as a light line, held-out reward as points joined by a line, over optimizer steps."""
    train = [point for point in train if math.isfinite(point[1])]
    held_out = [point for point in held_out if math.isfinite(point[1])]
    xs = [x for x, _ in (*train, *held_out)] or [0.0, 1.0]
    ys = [y for _, y in (*train, *held_out)] or [0.0, 1.0]
    x_ticks = ticks(min(0.0, *xs), max(1.0, *xs), 8, whole=True)
    # Rewards mostly live in [0, 1]: showing all of it makes charts of different runs comparable.
    y_ticks = ticks(min(0.0, *ys), max(1.0, *ys), 5)
    frame = Frame(min(0.0, *xs), max(1.0, *xs), y_ticks[0], y_ticks[-1])
    series = [(points, color) for points, color in ((held_out, HELD_OUT), (train, TRAIN)) if points]
    body = axes(frame, x_ticks, y_ticks, "optimizer step", "reward")
    if train:
        body.append(f'<path d="{frame.path(train)}" {stroke(TRAIN, 1.5)} stroke-opacity="0.7"/>')
    if held_out:
        body += [f'<path d="{frame.path(held_out)}" {stroke(HELD_OUT, 2.5)}/>', *dots(frame, held_out, HELD_OUT)]
    body += end_labels(frame, [(points[-1][1], color) for points, color in series])
    return document(title, WIDTH, HEIGHT, LEFT, [*body, *_legend(bool(train), bool(held_out))])


def _legend(train: bool, held_out: bool) -> list[str]:
    parts: list[str] = []
    x = float(LEFT)
    if held_out:
        parts.append(f'<path d="M{x},42h22" {stroke(HELD_OUT, 2.5)}/>')
        parts.append(f'<circle cx="{x + 11}" cy="42" r="4" fill="{HELD_OUT}"/>')
        parts.append(text(x + 28, 46.5, "held-out reward (evaluations)"))
        x += 240
    if train:
        parts.append(f'<path d="M{x},42h22" {stroke(TRAIN, 1.5)}/>')
        parts.append(text(x + 28, 46.5, "train reward"))
    return parts


def document(title: str, width: float, height: float, left: float, body: Sequence[str], caption: str = "") -> str:
    """Return a whole picture. Its title begins at `left`, and so does the caption, below everything else."""
    style = "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:13px"
    whole = height + 22 if caption else height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}" width="{width}" '
            f'height="{whole}" role="img" style="{style}">',
            f"<title>{escape(title)}</title>",
            f"<style>{DARK_STYLE}</style>",
            f'<rect class="hr-paper" x="0" y="0" width="{width}" height="{whole}" fill="{PAPER}"/>',
            f'<text class="hr-text" x="{left}" y="24" fill="{TEXT}" font-size="16" font-weight="600">'
            f"{escape(title)}</text>",
            *body,
            *([text(left, height + 8, caption, size=12)] if caption else []),
            "</svg>\n",
        ]
    )


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover [low, high] in at most about `most` intervals."""
    rough = max(high - low, 1e-9) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Return ticks as text, with as many decimals as their distance has."""
    step = values[1] - values[0] if len(values) > 1 else 1.0
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 4:
        return [f"{value:.4g}" for value in values]
    return [f"{0.0 if abs(value) < step / 2 else value:,.{decimals}f}" for value in values]


def same_digits(values: Sequence[float]) -> list[str]:
    """Return values as text with the same number of decimals, four digits of the largest, three where it is small."""
    largest = max(map(abs, values), default=0.0)
    exponent = math.floor(math.log10(largest)) if largest else 0
    if not -4 <= exponent < 7:
        return [f"{value:.2e}" for value in values]
    decimals = 2 - exponent if exponent < 0 else max(0, 3 - exponent)
    return [f"{value:,.{decimals}f}" for value in values]


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float


CHART = Box(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)


class Frame:
    """From data to pixels. Neither range may be empty."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float, box: Box = CHART) -> None:
        self.x_low, self.x_high, self.y_low, self.y_high = x_low, x_high, y_low, y_high
        self.box = box

    def x(self, value: float) -> str:
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return f"{self.box.left + share * (self.box.right - self.box.left):.1f}"

    def y(self, value: float) -> str:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return f"{self.box.bottom - share * (self.box.bottom - self.box.top):.1f}"

    def path(self, points: Points) -> str:
        # The trailing "h0" makes a single point visible as a dot of the round line cap.
        return "M" + "L".join(f"{self.x(x)},{self.y(y)}" for x, y in points) + "h0"


def axes(
    frame: Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str, left: float = 20
) -> list[str]:
    """Lines at the ticks with their values, and what the values are: below, and above from `left` on."""
    box = frame.box
    parts = []
    for tick, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
        y = frame.y(tick)
        parts.append(rule(f"M{box.left:.1f},{y}H{box.right:.1f}", opacity=0.25))
        parts.append(text(box.left - 8, float(y) + 4.5, label, "end"))
    for tick, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
        if frame.x_low <= tick <= frame.x_high:
            x = frame.x(tick)
            parts.append(rule(f"M{x},{box.top:.1f}V{box.bottom:.1f}", opacity=0.12))
            parts.append(text(float(x), box.bottom + 18, label, "middle"))
    if y_ticks:
        parts.append(rule(f"M{box.left:.1f},{box.bottom:.1f}H{box.right:.1f}"))
    parts.append(text((box.left + box.right) / 2, box.bottom + 40, x_label, "middle"))
    return [*parts, *([text(left, box.top - 14, y_label)] if y_label else [])]


def rule(path: str, opacity: float = 1.0, dashes: str = "", width: float = 1.0) -> str:
    """A line of the frame, in the colour of text."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<path class="hr-line" d="{path}" fill="none" stroke="{TEXT}" stroke-width="{width:g}" '
        f'stroke-opacity="{opacity:g}"{dashed}/>'
    )


def band(frame: Frame, above: Points, below: Points, color: str) -> str:
    """The area between two lines over the same steps."""
    return f'<path d="{frame.path([*above, *reversed(below)])}Z" fill="{color}" fill-opacity="0.15"/>'


def dots(frame: Frame, points: Points, color: str) -> list[str]:
    return [f'<circle cx="{frame.x(x)}" cy="{frame.y(y)}" r="4" fill="{color}"/>' for x, y in points]


def end_labels(frame: Frame, ends: Sequence[tuple[float, str]]) -> list[str]:
    """The last values of lines, each in its line's colour, beside the chart, as far apart as it takes to be read."""
    order = sorted(ends, key=lambda end: -end[0])
    places = spread([float(frame.y(value)) for value, _ in order], frame.box.top, frame.box.bottom)
    labels = same_digits([value for value, _ in order])
    return [
        text(frame.box.right + 9, place + 4.5, label, color=color)
        for (_, color), place, label in zip(order, places, labels, strict=True)
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


def stroke(color: str, width: float) -> str:
    return f'fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"'


def text(x: float, y: float, content: str, anchor: str = "start", color: str = TEXT, size: int | None = None) -> str:
    sized = "" if size is None else f' font-size="{size}"'
    themed = ' class="hr-text"' if color == TEXT else ""
    place = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {place} fill="{color}"{themed} text-anchor="{anchor}"{sized}>{escape(content)}</text>'
