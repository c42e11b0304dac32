"""Pictures of the main pages for the documentation, made only on request.

make test-view ARGS="-k pictured --screenshots docs/images/view --pictured outputs"
"""

from pathlib import Path
from typing import Any

import pytest

from tests.view.conftest import Browsing, View

pytestmark = pytest.mark.view

MAX_PICTURE_BYTES = 150_000


def test_the_main_pages_are_pictured(page: Any, view: View, recorded: Path, request: pytest.FixtureRequest):
    target: Path | None = request.config.getoption("--screenshots")
    if target is None:
        pytest.skip("pictures are written on request: --screenshots DIR")
    target.mkdir(parents=True, exist_ok=True)
    browsing = Browsing(page, view(request.config.getoption("--pictured") or recorded))

    def picture(name: str, *route: object, at: str = "h1") -> None:
        browsing.go(*route)
        page.wait_for_timeout(500)  # charts are drawn when they come into view
        page.locator(at).first.evaluate("element => element.scrollIntoView()")
        page.wait_for_timeout(500)
        page.screenshot(path=target / f"{name}.png")
        assert (target / f"{name}.png").stat().st_size < MAX_PICTURE_BYTES

    runs = page.evaluate("fetch('api/runs').then(r => r.json()).then(d => d.runs.filter(r => r.kind !== 'sft'))")
    run = max(runs, key=lambda row: row["step"])["id"]
    steps = page.evaluate("id => fetch(`api/runs/${id}`).then(r => r.json()).then(d => d.token_steps)", run)
    picture("runs")
    picture("run", "run", run, at=".chart")
    picture("histograms", "run", run, at="h2:text-is('Histograms')")
    picture("time", "run", run, at=".wide .chart")
    picture("group", "run", run, "step", steps[-1], "group", 0)
    picture("tokens", "run", run, "step", steps[-1], "rollout", 0, at=".tokens")
    picture("credit", "run", run, "step", steps[-1], "rollout", 0, at="table.credit")
    picture("evaluation", "run", run, "evaluation")
    if len(runs) > 1:
        picture("compare", "compare", ",".join(row["id"] for row in runs[:2]))
