"""A small line chart as SVG text: pure, no dependency, legible on a white and on a dark page.

Left out on purpose: everything that a reward curve does not need (log axes, many series, interaction).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 54, 64, 50
TEXT, GRID = "#7d8590", "#7d859040"
TRAIN, HELD_OUT = "#6cb6ff", "#f0883e"


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
    body = [
        *axes(frame, x_ticks, y_ticks),
        *_train_line(frame, train),
        *_held_out_line(frame, held_out),
        *_legend(bool(train), bool(held_out)),
    ]
    return document(title, WIDTH, HEIGHT, LEFT, body)


def document(title: str, width: float, height: float, left: float, body: Sequence[str]) -> str:
    """A whole picture; its title begins at `left`."""
    style = "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:13px"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" style="{style}">',
            f"<title>{escape(title)}</title>",
            f'<text x="{left}" y="24" fill="{TEXT}" font-size="16" font-weight="600">{escape(title)}</text>',
            *body,
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


def axes(frame: Frame, x_ticks: list[float], y_ticks: list[float]) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<path d="M{LEFT},{y}H{WIDTH - RIGHT}" stroke="{GRID}"/>')
        parts.append(text(LEFT - 8, float(y) + 4.5, f"{tick:.4g}", "end"))
    for tick in x_ticks:
        if frame.x_low <= tick <= frame.x_high:
            x = frame.x(tick)
            parts.append(f'<path d="M{x},{bottom}v5" stroke="{TEXT}"/>')
            parts.append(text(float(x), bottom + 20, f"{tick:.10g}", "middle"))
    parts.append(f'<path d="M{LEFT},{bottom}H{WIDTH - RIGHT}" stroke="{TEXT}"/>')
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "optimizer step", "middle"))
    return parts


def _train_line(frame: Frame, points: Points) -> list[str]:
    if not points:
        return []
    return [f'<path d="{frame.path(points)}" {stroke(TRAIN, 1.5)} stroke-opacity="0.7"/>']


def _held_out_line(frame: Frame, points: Points) -> list[str]:
    if not points:
        return []
    line = f'<path d="{frame.path(points)}" {stroke(HELD_OUT, 2.5)}/>'
    dots = [f'<circle cx="{frame.x(x)}" cy="{frame.y(y)}" r="4" fill="{HELD_OUT}"/>' for x, y in points]
    last_x, last_y = points[-1]
    return [
        line,
        *dots,
        text(float(frame.x(last_x)) + 9, float(frame.y(last_y)) + 4.5, f"{last_y:.2f}", color=HELD_OUT),
    ]


def _legend(train: bool, held_out: bool) -> list[str]:
    parts: list[str] = []
    x = float(LEFT)
    if held_out:
        parts.append(f'<path d="M{x},42h22" {stroke(HELD_OUT, 2.5)}/>')
        parts.append(f'<circle cx="{x + 11}" cy="42" r="4" fill="{HELD_OUT}"/>')
        parts.append(text(x + 28, 46.5, "held-out reward"))
        x += 150
    if train:
        parts.append(f'<path d="M{x},42h22" {stroke(TRAIN, 1.5)}/>')
        parts.append(text(x + 28, 46.5, "train reward"))
    return parts


def stroke(color: str, width: float) -> str:
    return f'fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"'


def text(x: float, y: float, content: str, anchor: str = "start", color: str = TEXT, size: int | None = None) -> str:
    sized = "" if size is None else f' font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}"{sized}>{escape(content)}</text>'
