"""Plots as PNG and PDF."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest

from headrace.errors import BadInput
from headrace.observe.chart import HEIGHT, HELD_OUT, WIDTH, comparison_chart, reward_chart
from headrace.observe.chart_export import check_format, convert, convert_plots

SVG = reward_chart("run: $ and _", [(1, 0.5), (50, 0.7)], [(0, 0.0), (25, 0.5), (50, 1.0)])


def test_a_png_has_the_size_the_paper_and_the_colours_of_the_plot() -> None:
    from PIL import Image

    picture = Image.open(io.BytesIO(convert(SVG, "png"))).convert("RGB")
    assert picture.size == (2 * WIDTH, 2 * HEIGHT)
    assert picture.getpixel((1, 1)) == (255, 255, 255)
    held_out = tuple(int(HELD_OUT[at : at + 2], 16) for at in (1, 3, 5))
    assert held_out in {color for _, color in picture.getcolors(1 << 20)}


def test_every_kind_of_plot_is_a_pdf() -> None:
    band = comparison_chart("runs", {"grpo": [[(0, 0.1), (9, 0.5)], [(0, 0.2), (9, 0.9)]]}, ("teacher", 0.7))
    for svg in (SVG, band):
        assert convert(svg, "pdf").startswith(b"%PDF-")


def test_plots_are_written_beside_the_svg_and_other_files_are_left_alone(tmp_path: Path) -> None:
    page, plot = tmp_path / "summary.md", tmp_path / "reward.svg"
    page.write_text("# run\n")
    plot.write_text(SVG)
    assert convert_plots([page, plot], "svg") == []
    assert convert_plots([page, plot], "png") == [tmp_path / "reward.png"]
    assert {path.name for path in tmp_path.iterdir()} == {"summary.md", "reward.svg", "reward.png"}


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_format("svg")
    with pytest.raises(BadInput) as error:
        check_format("pdf")
    assert (error.value.key, error.value.value) == ("--format", "pdf")
    assert "headrace[plots]" in error.value.fix
