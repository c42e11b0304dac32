"""A whole run whose trainer and engine alternate on one device, here the CPU."""

from pathlib import Path

import pytest

from headrace.observe.metrics import read_metrics
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import headrace, write_run_file
from tests.observe.metrics_page import undocumented


@pytest.mark.full  # the kills of test_chaos are among the fast ones, and in turns
@pytest.mark.timeout(400)
def test_a_run_in_turns_trains_to_its_end(tmp_path: Path, tiny_model: Path):
    code, output = headrace("rl", write_run_file(tmp_path, tiny_model), "--launch.sharing", "alternate")
    assert code == 0, output
    run = RunDir(tmp_path / "run")
    steps = [record for record in read_metrics(run.metrics) if record["process"] == "trainer" and "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert all(record["time/wait_for_turn"] > 0 for record in steps)
    assert undocumented(steps) == []
    assert {path.name for path in run.device_lock.iterdir()} == {"cache", "lent", "turn", "wanted"}
