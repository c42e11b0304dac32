"""Pictures of the main pages for the documentation, made only on request.

make test-view ARGS="-k pictured --screenshots docs/images/view --pictured outputs"
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.view.conftest import Browsing, View

pytestmark = pytest.mark.view

MAX_PICTURE_BYTES = 150_000


PICTURED_COLUMN = "entropy"
SPREAD_ROLLOUT = """async ({run, step, column}) => {
  const listed = await fetch(`api/runs/${run}/steps/${step}`).then(r => r.json());
  let best = [0, -1];
  for (const row of listed.rollouts.row.slice(0, 64)) {
    const rollout = await fetch(`api/runs/${run}/steps/${step}/rollouts/${row}`).then(r => r.json());
    const packed = rollout.samples[0]?.values[column];
    const values = packed?.data ? [...HR.array(packed)].filter(Number.isFinite) : [];
    const mean = values.reduce((sum, v) => sum + v, 0) / values.length;
    const spread = values.reduce((sum, v) => sum + (v - mean) ** 2, 0);
    if (spread > best[1]) best = [row, spread];
  }
  return best[0];
}"""
"""Return the row of the rollout whose tokens differ most in a column."""


def test_the_main_pages_are_pictured(page: Any, view: View, recorded: Path, request: pytest.FixtureRequest):
    target: Path | None = request.config.getoption("--screenshots")
    if target is None:
        pytest.skip("pictures are written on request: --screenshots DIR")
    target.mkdir(parents=True, exist_ok=True)
    browsing = Browsing(page, view(request.config.getoption("--pictured") or recorded))

    def picture(name: str, *route: object, at: str = "h1", before: Callable[[], None] | None = None) -> None:
        browsing.go(*route)
        page.wait_for_timeout(500)  # charts are drawn when they come into view
        if before:
            before()
        page.locator(at).first.evaluate("element => element.scrollIntoView()")
        page.wait_for_timeout(500)
        page.screenshot(path=target / f"{name}.png")
        assert (target / f"{name}.png").stat().st_size < MAX_PICTURE_BYTES

    def color_tokens() -> None:
        """Colour the tokens, and point at the one with the strongest colour, whose numbers are then shown."""
        page.get_by_label("colour by").select_option(PICTURED_COLUMN)
        spans = page.locator(".token-text span")
        strength = "spans => spans.map(span => Number(span.style.backgroundColor.match(/[\\d.]+(?=\\))/)?.[0] ?? 0))"
        strengths = spans.evaluate_all(strength)
        spans.nth(strengths.index(max(strengths))).hover()

    runs = page.evaluate("fetch('api/runs').then(r => r.json()).then(d => d.runs.filter(r => r.kind !== 'sft'))")
    run = max(runs, key=lambda row: row["step"])["id"]
    steps = page.evaluate("id => fetch(`api/runs/${id}`).then(r => r.json()).then(d => d.token_steps)", run)
    picture("runs")
    picture("run", "run", run, at=".chart")
    picture("histograms", "run", run, at="h2:text-is('Histograms')")
    picture("time", "run", run, at=".wide .chart")
    picture("group", "run", run, "step", steps[-1], "group", 0)
    row = page.evaluate(SPREAD_ROLLOUT, {"run": run, "step": steps[0], "column": PICTURED_COLUMN})
    picture("tokens", "run", run, "step", steps[0], "rollout", row, before=color_tokens, at="h2:text-is('Tokens')")
    picture("credit", "run", run, "step", steps[0], "rollout", row, at="table.credit")
    picture("evaluation", "run", run, "evaluation")
    if len(runs) > 1:
        picture("compare", "compare", ",".join(row["id"] for row in runs[:2]))
