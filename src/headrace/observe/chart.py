"""SVG charts without a dependency: axes, lines with bands, dots, legends and labels, and the two line charts of runs.

The SVG subset (straight paths, circles, rectangles, text, six-digit colours, opacity as an attribute) is converted by
other programs as it is. A chart has its own background, light or dark as the viewer prefers, and colours that are
legible on both. Left out on purpose: everything that our charts do not need (log axes, interaction).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.safe_text import escape_xml

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 720, 356
LEFT, RIGHT, TOP, BOTTOM = 56, 62, 80, 50
PAPER, DARK_PAPER = "#ffffff", "#0d1117"
TEXT, DARK_TEXT = "#3d444d", "#c9d1d9"
COLORS = ("#d9650a", "#2f81f7", "#1f9d4d", "#a05cf0", "#b07c00", "#d6409f")
"""Colours of series. Each has a contrast of 3 or more with both backgrounds."""
HELD_OUT, TRAIN = COLORS[:2]
DASHES = ("", "9 5", "2 5", "12 4 2 4")
"""Dash patterns of series beyond the number of colours: one pattern per pass through the colours."""
LABEL_SPACING = 15
"""Pixels between two labels below each other."""
LEGEND_ROW = 20
"""Height of a row of the legend in pixels; if there are several rows, all are below the chart."""
MAX_DOTS = 30
"""Number of values up to which each value of a line has a dot, as evaluations have."""
BAND_CAPTION = "line: mean over seeds; band: from the lowest to the highest seed"
FONT = "font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;font-size:13px"
DARK_STYLE = (
    f"@media (prefers-color-scheme: dark) {{ .hr-paper {{ fill: {DARK_PAPER} }} .hr-text {{ fill: {DARK_TEXT} }} "
    f".hr-line {{ stroke: {DARK_TEXT} }} }}"
)


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float


class Plot:
    """A plotting area: maps data to pixels and collects SVG elements in `parts`. Neither range may be empty."""

    def __init__(
        self,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        box: Box = Box(LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM),  # noqa: B008
    ) -> None:
        self.x_range, self.y_range, self.box = x_range, y_range, box
        self.parts: list[str] = []

    def x(self, value: float) -> str:
        share = (value - self.x_range[0]) / (self.x_range[1] - self.x_range[0])
        return f"{self.box.left + share * (self.box.right - self.box.left):.1f}"

    def y(self, value: float) -> str:
        share = (value - self.y_range[0]) / (self.y_range[1] - self.y_range[0])
        return f"{self.box.bottom - share * (self.box.bottom - self.box.top):.1f}"

    def path(self, points: Points) -> str:
        # The trailing "h0" makes a single point visible as a dot of the round line cap.
        return "M" + "L".join(f"{self.x(x)},{self.y(y)}" for x, y in points) + "h0"

    def axes(self, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> None:
        """Add grid lines with the values of the ticks, and the labels of the axes."""
        box, parts = self.box, self.parts
        for tick, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
            y = self.y(tick)
            parts.append(rule(f"M{box.left:.1f},{y}H{box.right:.1f}", opacity=0.25))
            parts.append(text(box.left - 8, float(y) + 4.5, label, "end"))
        for tick, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
            if self.x_range[0] <= tick <= self.x_range[1]:
                x = self.x(tick)
                parts.append(rule(f"M{x},{box.top:.1f}V{box.bottom:.1f}", opacity=0.12))
                parts.append(text(float(x), box.bottom + 18, label, "middle"))
        if y_ticks:
            parts.append(rule(f"M{box.left:.1f},{box.bottom:.1f}H{box.right:.1f}"))
        parts.append(text((box.left + box.right) / 2, box.bottom + 40, x_label, "middle"))
        if y_label:
            parts.append(text(20, box.top - 14, y_label))

    def line(self, points: Points, style: str, dots: str = "") -> None:
        """Add a line with the attributes of `stroke`, and dots at its points in the colour `dots`."""
        self.parts.append(f'<path d="{self.path(points)}" {style}/>')
        if dots:
            self.parts += [f'<circle cx="{self.x(x)}" cy="{self.y(y)}" r="4" fill="{dots}"/>' for x, y in points]

    def band(self, high: Points, low: Points, color: str) -> None:
        """Add the area between two lines over the same steps."""
        self.parts.append(f'<path d="{self.path([*high, *reversed(low)])}Z" fill="{color}" fill-opacity="0.15"/>')

    def end_labels(self, ends: Sequence[tuple[float, str]]) -> None:
        """Add the last values of lines, given with their colours, to the right of the area without overlaps."""
        order = sorted(ends, key=lambda end: -end[0])
        positions = spread_labels([float(self.y(value)) for value, _ in order], self.box)
        labels = same_digits([value for value, _ in order])
        self.parts += [
            text(self.box.right + 9, y + 4.5, label, color=color)
            for (_, color), y, label in zip(order, positions, labels, strict=True)
        ]

    def side_labels(self, labels: Sequence[tuple[str, float, float, str]]) -> None:
        """Add labels (text, x and y of its point, colour), top down, to the right, each with a line to its point."""
        positions = spread_labels([float(self.y(y)) for _, _, y, _ in labels], self.box)
        for (label, x, y, color), position in zip(labels, positions, strict=True):
            line = f"M{self.x(x)},{self.y(y)}L{self.box.right + 16:.1f},{position:.1f}"
            self.parts.append(f'<path d="{line}" {stroke(color, 0.75)} stroke-opacity="0.6"/>')
            self.parts.append(text(self.box.right + 20, position + 4.5, label, color=color))


def reward_chart(title: str, train: Points, held_out: Points) -> str:
    """Return train reward as a light line and held-out reward as points joined by a line, over optimizer steps."""
    train = [point for point in train if math.isfinite(point[1])]
    held_out = [point for point in held_out if math.isfinite(point[1])]
    xs = [x for x, _ in (*train, *held_out)] or [0.0, 1.0]
    ys = [y for _, y in (*train, *held_out)] or [0.0, 1.0]
    # Rewards are mostly in [0, 1]: showing all of it makes charts of different runs comparable.
    y_ticks = ticks(min(0.0, *ys), max(1.0, *ys), 5)
    plot = Plot((min(0.0, *xs), max(1.0, *xs)), (y_ticks[0], y_ticks[-1]))
    plot.axes(ticks(*plot.x_range, 8, whole=True), y_ticks, "optimizer step", "reward")
    legend = []
    if train:
        plot.line(train, f'{stroke(TRAIN, 1.5)} stroke-opacity="0.7"')
        legend.append(("train reward", stroke(TRAIN, 1.5), ""))
    if held_out:
        plot.line(held_out, stroke(HELD_OUT, 2.5), dots=HELD_OUT)
        legend.insert(0, ("held-out reward (evaluations)", stroke(HELD_OUT, 2.5), HELD_OUT))
    plot.end_labels([(points[-1][1], color) for points, color in ((held_out, HELD_OUT), (train, TRAIN)) if points])
    entries, _ = _legend(legend)
    return document(title, WIDTH, HEIGHT, LEFT, [*plot.parts, *entries])


def comparison_chart(
    title: str,
    curves: Mapping[str, Sequence[Points]],
    level: tuple[str, float] | None = None,
    what: str = "reward",
    over: str = "optimizer step",
) -> str:
    """Return a chart of several kinds of runs: the mean over the seeds of each kind, in the band that they span.

    `curves` are the seeds of each kind by its name; steps count where all seeds of a kind have a value. `level` is a
    named value to compare with, drawn as a dashed line. `what` labels the values, `over` the x axis.
    """
    kinds = [_shared_values(runs) for runs in curves.values()]
    xs = [x for kind in kinds for x, _ in kind]
    values = [y for kind in kinds for _, seeds in kind for y in seeds] + ([level[1]] if level else [])
    last, low = max([1.0, *xs]), min([0.0, *values])
    high = max(values, default=low)
    y_ticks = ticks(low, high if high > low else low + 1.0, 5)
    plot = Plot((0.0, last), (y_ticks[0], y_ticks[-1]))
    plot.axes(ticks(0.0, last, 8, whole=True), y_ticks, over, what)
    ends, legend = [], []
    for number, (name, kind) in enumerate(zip(curves, kinds, strict=True)):
        color, dashes = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
        style = stroke(color, 2.5) + (f' stroke-dasharray="{dashes}"' if dashes else "")
        legend.append((name if kind else f"{name} (no step in common)", style, ""))
        if kind:
            mean = [(x, sum(seeds) / len(seeds)) for x, seeds in kind]
            plot.band([(x, max(seeds)) for x, seeds in kind], [(x, min(seeds)) for x, seeds in kind], color)
            plot.line(mean, style, dots=color if len(mean) <= MAX_DOTS else "")
            ends.append((mean[-1][1], color))
    plot.end_labels(ends)
    if level is not None:
        y = plot.y(level[1])
        plot.parts.append(rule(f"M{plot.x(0)},{y}H{plot.x(last)}", dashes="4 5", width=1.5))
        plot.parts.append(text(float(plot.x(last)), float(y) - 6, level[0], "end"))
    entries, below = _legend(legend)
    caption = BAND_CAPTION if any(len(runs) > 1 for runs in curves.values()) else ""
    return document(title, WIDTH, HEIGHT + below, LEFT, [*plot.parts, *entries], caption)


def _shared_values(runs: Sequence[Points]) -> list[tuple[float, list[float]]]:
    """Return the values of all runs at the steps that all of them have."""
    by_x = [{x: y for x, y in run if math.isfinite(y)} for run in runs]
    shared = sorted(set.intersection(*(set(run) for run in by_x))) if by_x else []
    return [(x, [run[x] for run in by_x]) for x in shared]


def _legend(entries: Sequence[tuple[str, str, str]]) -> tuple[list[str], int]:
    """Return the elements of a legend of (name, stroke, colour of the dot), and its height below the chart."""
    positions: list[tuple[float, int]] = []
    x, row = float(LEFT), 0
    for name, _, _ in entries:
        width = 44 + 7 * len(name)
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, row = float(LEFT), row + 1
        positions.append((x, row))
        x += width
    first = HEIGHT + LEGEND_ROW - 10 if row else 42
    parts: list[str] = []
    for (name, style, dot), (x, own_row) in zip(entries, positions, strict=True):
        y = first + LEGEND_ROW * own_row
        parts.append(f'<path d="M{x},{y}h22" {style}/>')
        if dot:
            parts.append(f'<circle cx="{x + 11}" cy="{y}" r="4" fill="{dot}"/>')
        parts.append(text(x + 28, y + 4.5, name))
    return parts, LEGEND_ROW * (row + 1) if row else 0


def document(title: str, width: float, height: float, left: float, body: Sequence[str], caption: str = "") -> str:
    """Return a whole SVG file. The title, and the caption below everything else, begin at `left`."""
    total = height + 22 if caption else height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" '
            f'height="{total}" role="img" style="{FONT}">',
            f"<title>{escape_xml(title)}</title>",
            f"<style>{DARK_STYLE}</style>",
            f'<rect class="hr-paper" x="0" y="0" width="{width}" height="{total}" fill="{PAPER}"/>',
            f'<text class="hr-text" x="{left}" y="24" fill="{TEXT}" font-size="16" font-weight="600">'
            f"{escape_xml(title)}</text>",
            *body,
            *([text(left, height + 8, caption, size=12)] if caption else []),
            "</svg>\n",
        ]
    )


def rule(path: str, opacity: float = 1.0, dashes: str = "", width: float = 1.0) -> str:
    """Return a line of the axes or a reference line, in the colour of text."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<path class="hr-line" d="{path}" fill="none" stroke="{TEXT}" stroke-width="{width:g}" '
        f'stroke-opacity="{opacity:g}"{dashed}/>'
    )


def stroke(color: str, width: float) -> str:
    return f'fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"'


def text(x: float, y: float, content: str, anchor: str = "start", color: str = TEXT, size: int | None = None) -> str:
    sized = "" if size is None else f' font-size="{size}"'
    themed = ' class="hr-text"' if color == TEXT else ""
    place = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {place} fill="{color}"{themed} text-anchor="{anchor}"{sized}>{escape_xml(content)}</text>'


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) that cover [low, high] in about `most` intervals."""
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
    """Return values as text with the same number of decimals: four digits of the largest, three if it is below 1."""
    largest = max(map(abs, values), default=0.0)
    exponent = math.floor(math.log10(largest)) if largest else 0
    if not -4 <= exponent < 7:
        return [f"{value:.2e}" for value in values]
    decimals = 2 - exponent if exponent < 0 else max(0, 3 - exponent)
    return [f"{value:,.{decimals}f}" for value in values]


def spread_labels(wanted: Sequence[float], box: Box) -> list[float]:
    """Return y positions of labels from top to bottom, near `wanted` and `LABEL_SPACING` apart, as far as they fit."""
    positions: list[float] = []
    for y in wanted:
        positions.append(max(y, positions[-1] + LABEL_SPACING if positions else box.top))
    limit = box.bottom
    for number in reversed(range(len(positions))):
        positions[number] = min(positions[number], limit)
        limit = positions[number] - LABEL_SPACING
    return positions
