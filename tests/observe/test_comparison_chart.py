"""Kinds of runs side by side: every kind is drawn and named, whatever its seeds have."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

from headrace.observe.chart import BAND_CAPTION, BOTTOM, COLORS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, comparison_chart

NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}


def lines(svg: str) -> list[list[tuple[float, float]]]:
    """The corners of each kind's mean, in order."""
    paths = [
        path.get("d", "") for path in ElementTree.fromstring(svg).findall("svg:path[@stroke-width='2.5']", NAMESPACE)
    ]
    points = [re.findall(r"([\d.]+),([\d.]+)", path) for path in paths if path.endswith("h0")]
    return [[(float(x), float(y)) for x, y in found] for found in points]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).findall("svg:text", NAMESPACE)]


def test_a_line_is_the_mean_of_the_seeds_at_the_steps_that_all_have():
    seeds = [[(0, 0.0), (5, 9.0), (10, 0.5)], [(0, 0.0), (10, 1.5), (20, 9.0)]]
    drawn = comparison_chart("runs", {"grpo": seeds})
    # The mean at step 10 is 1, and the axis goes up to 1.5.
    two_thirds = round(HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * 2 / 3, 1)
    assert lines(drawn) == [[(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, two_thirds)]]
    assert "1.000" in texts(drawn)
    assert {BAND_CAPTION, "reward", "optimizer step"} <= set(texts(drawn))


def test_runs_that_only_began_are_points_at_the_beginning():
    (points,) = lines(comparison_chart("runs", {"grpo": [[(0, 0.5)], [(0, 1.0)]]}))
    assert points == [(LEFT, round(TOP + (HEIGHT - TOP - BOTTOM) / 4, 1))]


def test_runs_that_earn_nothing_lie_on_the_axis():
    (points,) = lines(comparison_chart("runs", {"grpo": [[(0, 0.0), (10, 0.0)]]}))
    assert {y for _, y in points} == {HEIGHT - BOTTOM}


def test_of_seeds_without_a_common_step_the_legend_says_so():
    drawn = comparison_chart("runs", {"apart": [[(1, 0.5)], [(2, 0.5)]], "none": [], "grpo": [[(0, 0.1), (2, 0.2)]]})
    assert len(lines(drawn)) == 1
    assert {"apart (no step in common)", "none (no step in common)", "grpo"} <= set(texts(drawn))


def test_a_step_without_a_number_counts_as_none():
    drawn = comparison_chart("runs", {"grpo": [[(0, 0.5), (1, math.nan), (2, 0.5)]]})
    assert len(lines(drawn)[0]) == 2
    assert "nan" not in drawn


def test_more_kinds_than_colours_are_all_drawn_and_named_inside_the_picture():
    kinds = {f"algorithm number {number}": [[(0, 0.1), (10, number / 10)]] for number in range(len(COLORS) + 2)}
    drawn = comparison_chart("runs", kinds, ("teacher", 0.9))
    assert len(lines(drawn)) == len(kinds)
    page = ElementTree.fromstring(drawn)
    named = {element.text: element for element in page.findall("svg:text", NAMESPACE)}
    for name in kinds:
        assert float(named[name].get("x", "nan")) + 7 * len(name) < WIDTH
        assert float(named[name].get("y", "nan")) < float(page.get("height", "nan"))
    styles = [
        (path.get("stroke"), path.get("stroke-dasharray"))
        for path in page.findall("svg:path[@stroke-width='2.5']", NAMESPACE)
    ]
    assert len(set(styles)) == len(kinds)


def test_lines_that_end_alike_have_their_values_side_by_side():
    drawn = comparison_chart("runs", {"grpo": [[(0, 0.1), (2, 0.9)]], "opd": [[(0, 0.1), (1, 0.9)]]})
    heights = [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>0\.900<', drawn)]
    assert len(heights) == 2
    assert abs(heights[0] - heights[1]) >= 15
