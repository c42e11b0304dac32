"""Columns of metrics have the values of the lines of the file, in its order."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.histograms import PREFIX
from headrace.tools.view.series import MetricsTable
from tests.rollout.strategies import FIXED

NAMES = ("loss", "time", f"{PREFIX}ratio")
VALUES = st.one_of(st.none(), st.booleans(), st.integers(0, 9), st.floats(0, 9), st.sampled_from(["", "1.5"]))
RECORDS = st.lists(st.tuples(st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, VALUES)), st.booleans()))


@given(RECORDS, st.integers(0, 20))
@FIXED
def test_a_column_has_all_values_of_its_type_and_of_a_repeated_step_the_last(
    records: list[tuple[dict[str, Any], bool]], read_first: int
):
    """A run that goes back to a checkpoint repeats steps; the file grows between two questions."""
    lines, step = [], 0
    for values, goes_back in records:
        step = max(1, step - 2) if goes_back else step + 1
        lines.append({"step": step, **values})
    with tempfile.TemporaryDirectory() as directory:
        table = MetricsTable(Path(directory) / "metrics.jsonl")
        for end in (min(read_first, len(lines)), len(lines)):
            table.path.write_text("".join(json.dumps(line) + "\n" for line in lines[:end]))
            points = table.points(NAMES)
        for name in NAMES:
            expected: dict[int, Any] = {}
            for line in lines:
                value = line.get(name)
                if value is not None and isinstance(value, str) == name.startswith(PREFIX):
                    expected = {step: kept for step, kept in expected.items() if step < line["step"]}
                    expected[line["step"]] = value
            steps, kept = points[name]
            assert dict(zip(steps.tolist(), kept.tolist(), strict=True)) == expected
