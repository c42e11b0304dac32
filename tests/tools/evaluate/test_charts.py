"""The pictures: what is drawn, and that no two labels lie on each other."""

import itertools
import re

from headrace.observe.chart import Box, spread_labels
from headrace.tools.evaluate.report import CHARACTER, accuracy_chart, frontier, length_chart
from headrace.tools.evaluate.results import Estimate

LABEL = re.compile(r'<text x="([\d.-]+)" y="([\d.-]+)"[^>]*text-anchor="(\w+)"[^>]*>([^<]*)</text>')
SWEEP = [
    (f"lambda-{size}/seed-{seed}", Estimate(90.0 - 20 * size, 85.0, 95.0), Estimate(0.7 + seed / 1000, 0.6, 0.8))
    for size in range(4)
    for seed in range(3)
]


def boxes(svg: str) -> dict[str, tuple[float, float, float, float]]:
    """Where each label is, about: left, top, right, bottom."""
    found = {}
    for x, y, anchor, content in LABEL.findall(svg):
        width = CHARACTER * len(content)
        left = float(x) - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        found[f"{content} at {x},{y}"] = (left, float(y) - 10, left + width, float(y) + 3)
    return found


def check_legible(svg: str) -> None:
    placed = boxes(svg)
    for (one, a), (other, b) in itertools.combinations(placed.items(), 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, f"{one} lies on {other}"
    height = float(re.search(r'height="([\d.]+)"', svg)[1])
    for label, (left, top, right, bottom) in placed.items():
        assert left >= 0 and top >= 0 and right <= 720 and bottom <= height, f"{label} is cut off"


def test_every_model_has_a_row_with_its_value_and_its_interval():
    svg = accuracy_chart("sums", [(name, accuracy) for name, _, accuracy in SWEEP])
    assert all(f">{name}</text>" in svg for name, _, _ in SWEEP)
    assert svg.count(">0.700</text>") == 4
    check_legible(svg)


def test_points_that_are_close_have_names_that_are_not():
    check_legible(length_chart("sums", "tokens", SWEEP))
    check_legible(length_chart("sums", "tokens", SWEEP[:1]))
    many = [(f"run-{number}", Estimate(5.0, 5.0, 5.0), Estimate(0.0, 0.0, 0.0)) for number in range(60)]
    check_legible(length_chart("sums", "tokens", many))


def test_long_names_are_shown_by_their_ends():
    name = "x" * 60 + "/step-9"
    svg = length_chart("sums", "tokens", [(name, Estimate(5.0, 4.0, 6.0), Estimate(0.5, 0.4, 0.6))])
    assert "…" + "x" * 32 + "/step-9<" in svg
    check_legible(svg)


def test_the_frontier_has_the_models_that_none_beats_in_both():
    points = [(10.0, 0.5), (20.0, 0.4), (30.0, 0.9), (30.0, 0.8), (40.0, 0.9)]
    assert frontier(points) == [(10.0, 0.5), (30.0, 0.9)]
    assert frontier([]) == []


def test_labels_move_as_little_as_it_takes():
    box = Box(0, 10, 100, 200)
    assert spread_labels([10.0, 12.0, 100.0], box) == [10.0, 25.0, 100.0]
    assert spread_labels([190.0, 195.0, 199.0], box) == [170.0, 185.0, 200.0]
