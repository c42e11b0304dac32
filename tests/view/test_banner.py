"""What `headrace doctor` finds is a banner of the run's page, and of its export as of that moment."""

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.observe.diagnosis import diagnose
from headrace.observe.run_state import HeartbeatContent, RunReader
from headrace.observe.status import Status
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import headrace
from tests.view.conftest import Browsing, View

pytestmark = pytest.mark.view

HOSTILE = "<script>alert(1)</script>\x1b[31m no space left on device"


@pytest.fixture
def failed_run(recorded: Path, tmp_path: Path) -> RunDir:
    """A run whose trainer has failed."""
    run = RunDir(tmp_path / "failed")
    shutil.copytree(recorded / "rl", run.root)
    beat = HeartbeatContent(1000.0, 1, "failed", 4, 990.0, "trainer exited with status 1")
    run.heartbeat.write_bytes(msgspec.json.encode(beat))
    Status(run.status, "trainer").close("failed", HOSTILE)
    return run


def test_findings_are_a_banner_and_a_healthy_run_has_none(
    page: Any, browsing: Browsing, view: View, failed_run: RunDir
):
    browsing.go("run", browsing.run_id("rl"))
    page.wait_for_selector(".chart canvas")
    assert page.locator(".banner").count() == 0
    findings = diagnose(RunReader(failed_run).read())
    assert [(finding.kind, finding.process) for finding in findings] == [("failed", "launcher"), ("failed", "trainer")]
    status, output = headrace("view", failed_run.root, "--export", failed_run.root.parent / "export")
    assert status == 0, output
    for url in (view(failed_run.root), (failed_run.root.parent / "export" / "index.html").as_uri()):
        shown = Browsing(page, url)
        lines = page.locator(".banner li.problem").all_inner_texts()
        assert len(lines) == len(findings)
        for line, finding in zip(lines, findings, strict=True):
            assert line.startswith(finding.process) and finding.fix in line
        assert "trainer exited with status 1" in lines[0]
        assert r"<script>alert(1)</script>\x1b[31m no space left" in lines[1]
        assert shown.page.get_by_role("alert").count() == 1


def test_a_page_asks_again_after_requests_that_failed_once(page: Any, view: View, failed_run: RunDir):
    failed = []

    def fail_once(route: Any) -> None:
        kind = "events" if "/events" in route.request.url else "run"
        if kind in failed:
            route.continue_()
            return
        failed.append(kind)
        if kind == "events":
            route.fulfill(status=503)  # a browser does not open such a stream again by itself
        else:
            route.abort("connectionreset")

    page.route(re.compile(r"/api/runs/[0-9a-f]{12}(/events.*)?$"), fail_once)
    page.goto(view(failed_run.root))
    page.wait_for_selector(".banner li.problem")
    failed_run.heartbeat.write_bytes(msgspec.json.encode(HeartbeatContent(1000.0, 1, "finished", 4, 990.0)))
    page.wait_for_selector(".banner", state="detached")
    assert failed == ["run", "events"]
    assert len(page.errors) == 2  # the browser reports both
    page.errors.clear()
