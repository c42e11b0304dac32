"""Conversion of SVG charts to PNG and PDF with matplotlib (the extra `plots`).

Supports the elements of `observe.chart`: straight paths, circles, rectangles and text. The result is in light colours.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from headrace.errors import BadInput
from headrace.transport.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS_PER_PIXEL = 0.75
"""An inch has 72 points, and 96 pixels in SVG."""
FONT_SCALE = 0.92
"""Matplotlib's default font is wider than those of browsers."""
PNG_DPI = 192
"""Two pixels for each pixel in SVG."""
COMMAND = re.compile(r"([MLHVhvZ])([^MLHVhvZ]*)")


def check_format(format: str) -> None:
    """Raise `BadInput` if charts cannot be written in `format`; call it before the work."""
    if format != "svg" and importlib.util.find_spec("matplotlib") is None:
        fact = "this format needs matplotlib, which is not installed"
        raise BadInput(fact, key="--format", value=format, fix="Install it with: pip install 'headrace[plots]'")


def convert_plots(files: Sequence[Path], format: str) -> list[Path]:
    """Convert every SVG among the files, beside it; return the new files, none if `format` is SVG itself."""
    plots = [] if format == "svg" else [path for path in files if path.suffix == ".svg"]
    for path in plots:
        write_atomically(path.with_suffix(f".{format}"), convert(path.read_text(), format))
    return [path.with_suffix(f".{format}") for path in plots]


def convert(svg: str, format: str) -> bytes:
    """Return an SVG chart as PNG or PDF."""
    from matplotlib.figure import Figure

    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    figure = Figure(figsize=(width / 96, height / 96), dpi=PNG_DPI)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for element in root:
        _draw(axes, element.tag.rpartition("}")[2], element.attrib, element.text or "")
    file = io.BytesIO()
    figure.savefig(file, format=format)
    return file.getvalue()


def _draw(axes: Axes, tag: str, attributes: dict[str, str], content: str) -> None:
    """Draw one element of an SVG chart."""
    from matplotlib.patches import Circle, PathPatch, Rectangle

    def number(name: str, otherwise: float = 0.0) -> float:
        return float(attributes.get(name, otherwise))

    if tag == "text":
        axes.text(
            number("x"),
            number("y"),
            content,
            color=attributes["fill"],
            fontsize=number("font-size", 13) * POINTS_PER_PIXEL * FONT_SCALE,
            fontweight="bold" if "font-weight" in attributes else "normal",
            ha={"start": "left", "middle": "center", "end": "right"}[attributes.get("text-anchor", "start")],
            va="baseline",
            parse_math=False,
        )
    elif tag == "path":
        axes.add_patch(PathPatch(_path(attributes["d"]), **_style(attributes), capstyle="round"))
    elif tag == "circle":
        axes.add_patch(Circle((number("cx"), number("cy")), number("r"), **_style(attributes)))
    elif tag == "rect":
        corner = number("x"), number("y")
        axes.add_patch(Rectangle(corner, number("width"), number("height"), **_style(attributes)))


def _style(attributes: dict[str, str]) -> dict[str, Any]:
    """Return fill and stroke as arguments for matplotlib, where dashes are in multiples of the line width."""
    fill, line = attributes.get("fill", "none"), attributes.get("stroke", "none")
    width = float(attributes.get("stroke-width", 1))
    dashes = [float(length) / width for length in attributes.get("stroke-dasharray", "").split()]
    return {
        "facecolor": fill if fill == "none" else (fill, float(attributes.get("fill-opacity", 1))),
        "edgecolor": line if line == "none" else (line, float(attributes.get("stroke-opacity", 1))),
        "linewidth": width * POINTS_PER_PIXEL if line != "none" else 0,
        "linestyle": (0, dashes) if dashes else "solid",
    }


def _path(description: str) -> Any:
    """Return the outline that an SVG path describes, a `matplotlib.path.Path`."""
    from matplotlib.path import Path as Outline

    points: list[tuple[float, float]] = []
    codes: list[Any] = []
    x = y = 0.0
    for command, text in COMMAND.findall(description):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", text)]
        if command in "ML":
            x, y = numbers
        elif command in "Hh":
            x = numbers[0] + (x if command == "h" else 0.0)
        elif command in "Vv":
            y = numbers[0] + (y if command == "v" else 0.0)
        points.append((x, y))
        codes.append({"M": Outline.MOVETO, "Z": Outline.CLOSEPOLY}.get(command, Outline.LINETO))
    return Outline(points, codes)
