"""`headrace doctor` on real runs: nothing about a healthy one, and the cause within a minute of whatever stops it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.machine import list_processes
from headrace.observe.diagnosis import diagnose
from headrace.observe.run_state import RunReader
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import finish, headrace, processes_of, start, wait_until, write_run_file
from tests.end_to_end.test_algorithms import served
from tests.faults.injection import stopped

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
]

NAMED_S = 60.0
"""Time within which the cause must be named."""


@contextmanager
def live_run(
    directory: Path, model: Path, changes: Mapping[str, str] | None = None, output: Path | None = None
) -> Iterator[tuple[RunDir, subprocess.Popen[str]]]:
    """A run that goes on until the end of the block, after its second step, and its launcher.

    `changes` are texts of the run file, and what replaces their first occurrence.
    """
    run = RunDir(output or directory / "run")
    file = write_run_file(directory, model, run.root)
    for old, new in (changes or {}).items():
        file.write_text(file.read_text().replace(old, new, 1))
    environment = {**os.environ, "HANG_FILE": str(directory / "hang")}
    launcher = start("rl", file, "--max_steps", 10_000, env=environment)
    try:
        wait_until(lambda: launcher.poll() is not None or latest_step(run) >= 2, "two steps", timeout=240)
        assert launcher.poll() is None, finish(launcher)[1]
        yield run, launcher
    finally:
        launcher.terminate()
        finish(launcher)


def latest_step(run: RunDir) -> int:
    return RunReader(run).read().history.step if run.metrics.exists() else 0


def report(run: RunDir) -> tuple[int, list[dict[str, Any]]]:
    """The exit status of `headrace doctor --json`, and its findings."""
    code, output = headrace("doctor", run.root, "--json")
    return code, json.loads(output)["findings"]


def wait_for_finding(run: RunDir, kind: str, process: str) -> dict[str, Any]:
    """The finding, once it is reported as a problem; fails after a minute."""
    deadline, findings = time.monotonic() + NAMED_S, []
    while time.monotonic() < deadline:
        code, findings = report(run)
        for finding in findings:
            if (finding["kind"], finding["process"], finding["severity"]) == (kind, process, "problem"):
                assert code == 1
                return finding
        time.sleep(0.5)
    raise AssertionError(f"{kind} of {process} is not among {findings}")


def engine_of(run: RunDir) -> int:
    """The id of the engine's process, which its server has started: the child with the most memory."""
    server = processes_of(run.root)["inference"]
    children = [pid for pid, process in list_processes().items() if process.parent == server]
    return max(children, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


def test_a_healthy_run_has_no_finding_and_each_process_that_is_stopped_is_named(tmp_path: Path, tiny_model: Path):
    with live_run(tmp_path, tiny_model) as (run, launcher):
        assert report(run) == (0, [])
        victims: dict[str, Callable[[], int]] = {
            name: lambda name=name: processes_of(run.root)[name] for name in ("trainer", "orchestrator", "inference")
        }
        for name, find in [*victims.items(), ("inference", lambda: engine_of(run)), ("launcher", lambda: launcher.pid)]:
            before = latest_step(run)
            with stopped(pid := find()):
                assert str(pid) in wait_for_finding(run, "stopped", name)["fix"]
            wait_until(lambda before=before: latest_step(run) > before, "a step after the stop")
        assert not any(finding["kind"] == "stopped" for finding in report(run)[1])


@pytest.mark.parametrize(("how", "kind"), [("awaits", "environment"), ("blocks", "reported")])
def test_an_environment_that_hangs_is_named(how: str, kind: str, tmp_path: Path, tiny_model: Path):
    with live_run(tmp_path, tiny_model, {"environments:Letters": "environments:Hanging"}) as (run, _):
        (tmp_path / "hang").write_text(how)
        fact = wait_for_finding(run, kind, "orchestrator")["fact"]
        assert ("'letters'" if how == "awaits" else "environments.py, line ") in fact
        before = latest_step(run)
        (tmp_path / "hang").unlink()
        wait_until(lambda: latest_step(run) > before, "a step after the hang")


def test_a_stall_of_unknown_cause_is_named_within_a_minute_in_a_run_with_long_steps(tmp_path: Path, tiny_model: Path):
    with live_run(tmp_path, tiny_model, {"environments:Letters": "environments:Judged"}) as (run, _):
        assert max(RunReader(run).read().history.step_seconds) > NAMED_S / 3
        assert report(run) == (0, [])
        (tmp_path / "hang").write_text("awaits")
        wait_until(lambda: RunReader(run).read().quiet_s > NAMED_S / 2, "a run without a sign of progress", 180)
        assert "no progress for" in wait_for_finding(run, "stalled", "run")["fact"]
        assert RunReader(run).read().quiet_s < NAMED_S
        before = latest_step(run)
        (tmp_path / "hang").unlink()
        wait_until(lambda: latest_step(run) > before, "a step after the stall")


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1 << 20))


def test_a_full_disk_is_named_and_stays_so_after_the_run_has_ended(tmp_path: Path, tiny_model: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m", "tmpfs", disk], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        with live_run(tmp_path, tiny_model, output=disk / "run") as (run, launcher):
            with pytest.raises(OSError, match="No space left"):
                fill(disk)
            wait_for_finding(run, "disk_full", "disk")
            wait_until(lambda: launcher.poll() is not None, "the end of the run", timeout=240)
            wait_for_finding(run, "disk_full", "disk")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_teacher_that_died_is_named_by_its_address_and_by_what_it_costs(tmp_path: Path, tiny_model: Path):
    with served(tiny_model) as (teacher, url):
        algo = f'algo = {{ type = "opd", teacher = {{ name = "teacher", base_url = "{url}" }} }}'
        with live_run(tmp_path, tiny_model, {"group_size = 4": f"group_size = 4\n{algo}"}) as (run, _):
            assert report(run)[0] == 0
            teacher.kill()
            finding = wait_for_finding(run, "unreachable", "orchestrator.algo.teacher")
            assert url in finding["fact"]
            # The page and the terminal make no connections.
            wait_until(
                lambda: any(found.kind == "reported" for found in diagnose(RunReader(run).read())),
                "the orchestrator's report",
                timeout=NAMED_S,
            )


def test_an_engine_without_memory_is_named(tmp_path: Path, tiny_model: Path):
    with live_run(tmp_path, tiny_model) as (run, launcher):
        resident = int(Path(f"/proc/{engine_of(run)}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        # What the launcher starts from now on may map no more than the engine had in memory: too little for it.
        resource.prlimit(launcher.pid, resource.RLIMIT_AS, (resident, resident))
        os.kill(processes_of(run.root)["inference"], signal.SIGKILL)
        assert "restart" in wait_for_finding(run, "out_of_memory", "inference")["fact"]
