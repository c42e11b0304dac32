"""The chart is valid SVG and puts points where they belong."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from headrace.observe.chart import (
    BOTTOM,
    COLORS,
    DARK_PAPER,
    DARK_TEXT,
    HEIGHT,
    LEFT,
    PAPER,
    RIGHT,
    TEXT,
    TOP,
    WIDTH,
    reward_chart,
    same_digits,
    tick_labels,
    ticks,
)

NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}


def circles(svg: str) -> list[tuple[float, float]]:
    """The held-out points; the legend's own dot comes last."""
    found = ElementTree.fromstring(svg).findall("svg:circle", NAMESPACE)
    return [(float(circle.get("cx", "nan")), float(circle.get("cy", "nan"))) for circle in found][:-1]


def test_points_land_on_their_coordinates() -> None:
    assert circles(reward_chart("run", [(1, 0.5)], [(0, 0.0), (50, 1.0)])) == [
        (LEFT, HEIGHT - BOTTOM),
        (WIDTH - RIGHT, TOP),
    ]


@pytest.mark.parametrize(
    ("train", "held_out"),
    [([], []), ([(1, 0.3)], []), ([(1, float("nan")), (2, 0.1)], [(0, -5.0), (3000, 7.0)])],
)
def test_any_data_gives_well_formed_svg(train: list[tuple[int, float]], held_out: list[tuple[int, float]]) -> None:
    svg = reward_chart("a <b> & c", train, held_out)
    assert ElementTree.fromstring(svg).find("svg:title", NAMESPACE).text == "a <b> & c"  # type: ignore[union-attr]
    assert "nan" not in svg


def test_ticks_are_round_and_cover_the_range() -> None:
    assert ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(-2.5, 7.5, 5) == [-4, -2, 0, 2, 4, 6, 8]
    assert ticks(0, 3, 8, whole=True) == [0, 1, 2, 3]


def luminance(color: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    shares = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_text_and_lines_are_legible_on_light_and_on_dark_paper() -> None:
    assert contrast(TEXT, PAPER) >= 7
    assert contrast(DARK_TEXT, DARK_PAPER) >= 7
    for color in COLORS:
        assert min(contrast(color, PAPER), contrast(color, DARK_PAPER)) >= 3


def test_a_plot_has_its_own_paper_labelled_axes_and_colours_that_every_program_reads() -> None:
    svg = reward_chart("run", [(1, 0.5)], [(0, 0.0), (50, 1.0)])
    page = ElementTree.fromstring(svg)
    paper = page.find("svg:rect", NAMESPACE)
    assert paper is not None
    assert (paper.get("width"), paper.get("height")) == (page.get("width"), page.get("height"))
    assert "prefers-color-scheme: dark" in svg
    assert {"optimizer step", "reward"} <= {element.text for element in page.findall("svg:text", NAMESPACE)}
    assert all(len(color) == 7 for color in re.findall(r"#[0-9a-fA-F]+", svg))


def test_the_ends_of_lines_have_the_same_number_of_digits() -> None:
    assert same_digits([0.9, 0.12345, 1.0]) == ["0.900", "0.123", "1.000"]
    assert same_digits([12.5, 3.0]) == ["12.50", "3.00"]
    assert same_digits([12345.6, 7.0]) == ["12,346", "7"]
    assert same_digits([0.0123, 0.001]) == ["0.0123", "0.0010"]
    assert same_digits([2e-7, 1e-7]) == ["2.00e-07", "1.00e-07"]
    assert same_digits([0.0]) == ["0.000"]
    assert same_digits([]) == []


def test_ticks_have_as_many_decimals_as_they_are_apart() -> None:
    assert tick_labels([0.0, 0.2, 0.4]) == ["0.0", "0.2", "0.4"]
    assert tick_labels([-0.5, 0.0, 0.5]) == ["-0.5", "0.0", "0.5"]
    assert tick_labels([0.0, 1000.0, 2000.0]) == ["0", "1,000", "2,000"]
    assert tick_labels([]) == []
