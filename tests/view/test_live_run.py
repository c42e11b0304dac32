"""A run that goes on: its page follows it to the end without being loaded again."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import finish, processes_of, start, write_run_file
from tests.faults.injection import stopped
from tests.view.conftest import Browsing, View

pytestmark = pytest.mark.view

START_TIMEOUT_S = 120
RUN_TIMEOUT_S = 180


def test_a_page_follows_a_running_run_to_its_end(page: Any, view: View, tiny_model: Path, tmp_path: Path):
    run_file = write_run_file(tmp_path, tiny_model)
    run_file.write_text(run_file.read_text().replace("max_steps = 3", "max_steps = 8"))
    run = start("rl", run_file)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (metrics.exists() and metrics.stat().st_size and "trainer" in processes_of(tmp_path / "run")):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        with stopped(processes_of(tmp_path / "run")["trainer"]):  # the run cannot end before the page is open
            browsing = Browsing(page, view(tmp_path / "run"))
            page.evaluate("window.loadedOnce = true")
            browsing.wait("/trainer.*stopped/.test(document.querySelector('.banner')?.textContent)")
        browsing.wait("!/stopped/.test(document.querySelector('.banner')?.textContent)")
        page.wait_for_selector(".chart canvas", timeout=RUN_TIMEOUT_S * 1000)
        browsing.wait("/step 8 of 8/.test(document.querySelector('h1').textContent)", timeout_s=RUN_TIMEOUT_S)
        browsing.wait("document.querySelector('h1 .state').textContent === 'finished'", timeout_s=RUN_TIMEOUT_S)
        page.get_by_role("link", name="Steps").click()
        browsing.wait("document.querySelectorAll('.steps a').length === 8")
        assert page.evaluate("window.loadedOnce")
    finally:
        status, output = finish(run)
    assert status == 0, output
