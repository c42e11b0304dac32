"""The chart is valid SVG and puts points where they belong."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from headrace.observe.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, reward_chart, ticks

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
