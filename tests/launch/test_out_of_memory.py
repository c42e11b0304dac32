"""Processes that the kernel ended for memory. Its files are simulated; processes, signals and peaks are real."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from headrace.errors import AGAIN
from headrace.launch.hosts.base import ProcessSpec
from headrace.launch.node import NodeProcesses
from headrace.launch.node_messages import Start
from headrace.launch.out_of_memory import RECENT_S, OomMonitor
from headrace.launch.process import RSS_UNIT_BYTES, Lifeline, Process
from headrace.machine import HostMemory
from tests.launch.launching import assert_all_gone, finish, launch
from tests.launch.node_world import wait_for

MIB = 1 << 20
USED_MIB = 64
LARGE_MIB = 1 << 20
"""A machine on which every process of a test is small."""
PROGRAM = f"memory = b'1' * ({USED_MIB} << 20); print('ready', flush=True); import time; time.sleep(60)"


def simulate_kernel(root: Path, total_mib: int, kills: int | None) -> HostMemory:
    """Write the kernel's files of a machine; `kills` None: it does not count them."""
    files = {"proc/meminfo": f"MemTotal: {total_mib << 10} kB\nMemAvailable: {total_mib << 9} kB\n"}
    if kills is not None:
        files |= {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": f"oom_kill {kills}\n"}
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return HostMemory(root)


def ended(directory: Path, *, number: int | None = signal.SIGKILL, program: str = PROGRAM) -> Process:
    """Return a process that a signal has ended after it had used memory; None: that has ended by itself."""
    lifeline = Lifeline()
    process = Process(ProcessSpec("trainer", [sys.executable, "-c", program]), directory / "log", lifeline)
    deadline = time.monotonic() + 30
    while "ready" not in process.log.read_text() and process.running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert number is None or process.peak_bytes == 0
    if process.running and number is not None:
        os.kill(process.pid, number)
    assert process.wait(10)
    lifeline.close()
    return process


def test_the_peak_of_an_ended_process_is_what_it_used(tmp_path: Path) -> None:
    peak = ended(tmp_path).peak_bytes
    # With an interpreter; and the kernel includes the peak of the process that it was forked from.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT_BYTES
    assert USED_MIB * MIB < peak <= max(own, (USED_MIB + 100) * MIB)


def test_a_kill_after_the_count_has_risen_was_for_memory(tmp_path: Path) -> None:
    monitor = OomMonitor(simulate_kernel(tmp_path, LARGE_MIB, kills=4))
    process = ended(tmp_path)
    simulate_kernel(tmp_path, LARGE_MIB, kills=5)
    found = monitor.explain(process, "saving the checkpoint of step 3", now=10.0)
    assert found is not None
    assert (found.process, found.peak_bytes, found.total_bytes) == ("trainer", process.peak_bytes, LARGE_MIB * MIB)
    assert found.activity == "saving the checkpoint of step 3"
    assert found.is_certain
    assert not found.repeats  # another program may have taken the memory


def test_a_process_on_another_host_is_judged_by_the_count_of_that_host(tmp_path: Path) -> None:
    here = OomMonitor(simulate_kernel(tmp_path / "here", LARGE_MIB, kills=0))
    there = NodeProcesses(simulate_kernel(tmp_path / "there", 2 * LARGE_MIB, kills=4))
    there.start(Start(1, "trainer", ["sleep", "60"], {}, str(tmp_path / "log")))
    assert there.states()[1].memory is None
    there.kill(1)
    simulate_kernel(tmp_path / "there", 2 * LARGE_MIB, kills=5)
    wait_for(lambda: there.states()[1].exit_status == -signal.SIGKILL)
    there.close()
    process = ended(tmp_path)
    process.is_here, process.memory = False, there.states()[1].memory
    found = here.explain(process, "", now=0.0)
    assert found is not None and found.is_certain and found.total_bytes == 2 * LARGE_MIB * MIB
    simulate_kernel(tmp_path / "here", LARGE_MIB, kills=1)
    process.memory = None  # the host was lost
    assert here.explain(process, "", now=0.0) is None


def test_a_process_with_most_of_the_memory_would_end_in_the_same_way_again(tmp_path: Path) -> None:
    monitor = OomMonitor(simulate_kernel(tmp_path, USED_MIB, kills=0))
    process = ended(tmp_path)
    simulate_kernel(tmp_path, USED_MIB, kills=1)
    found = monitor.explain(process, "", now=0.0)
    assert found is not None
    assert found.repeats


def test_a_kill_of_a_small_process_without_a_rise_has_another_cause(tmp_path: Path) -> None:
    monitor = OomMonitor(simulate_kernel(tmp_path, LARGE_MIB, kills=4))
    assert monitor.explain(ended(tmp_path), "", now=0.0) is None


def test_a_rise_long_ago_does_not_explain_a_kill(tmp_path: Path) -> None:
    monitor = OomMonitor(simulate_kernel(tmp_path, LARGE_MIB, kills=4))
    simulate_kernel(tmp_path, LARGE_MIB, kills=5)
    monitor.observe(0.0)
    assert monitor.explain(ended(tmp_path), "", now=RECENT_S + 1) is None


@pytest.mark.parametrize("kills", [None, 4])
def test_without_a_rise_the_peak_is_evidence_but_not_certain(tmp_path: Path, kills: int | None) -> None:
    found = OomMonitor(simulate_kernel(tmp_path, USED_MIB, kills)).explain(ended(tmp_path), "", now=0.0)
    assert found is not None
    assert not found.is_certain
    assert not found.repeats  # restarted once


@pytest.mark.parametrize("program", ["print('ready'); raise SystemExit(1)", PROGRAM], ids=["exit status 1", "SIGTERM"])
def test_other_ends_are_not_for_memory(tmp_path: Path, program: str) -> None:
    monitor = OomMonitor(simulate_kernel(tmp_path, USED_MIB, kills=0))
    simulate_kernel(tmp_path, USED_MIB, kills=1)
    process = ended(tmp_path, number=signal.SIGTERM, program=program)
    assert monitor.explain(process, "", now=0.0) is None


def test_a_server_whose_engine_was_ended_for_memory_is_recognized_by_the_count(tmp_path: Path) -> None:
    monitor = OomMonitor(simulate_kernel(tmp_path, USED_MIB, kills=0))
    process = ended(tmp_path, number=None, program=f"raise SystemExit({AGAIN})")
    assert monitor.explain(process, "", now=0.0) is None
    simulate_kernel(tmp_path, USED_MIB, kills=1)
    assert monitor.explain(process, "", now=0.0) is not None


# -- the supervisor -------------------------------------------------------------------------------------------------


def test_one_that_used_most_of_the_memory_is_not_restarted_and_the_run_says_why_it_failed(tmp_path: Path) -> None:
    simulate_kernel(tmp_path / "machine", total_mib=300, kills=0)
    arguments = ("inference=works", "trainer=out-of-memory", f"memory={tmp_path / 'machine'}")
    code, out, err = finish(launch(tmp_path, *arguments))
    assert code == 1
    assert "restarting" not in out
    assert "out of memory" in err
    assert "saving the checkpoint of step 1" in err
    assert "of 0.3 GiB" in err
    heartbeat = json.loads((tmp_path / "heartbeat.json").read_text())
    assert heartbeat["state"] == "failed"
    assert "out of memory" in heartbeat["problem"]
    assert_all_gone(tmp_path)


def test_another_one_is_restarted_once_without_progress(tmp_path: Path) -> None:
    simulate_kernel(tmp_path / "machine", total_mib=LARGE_MIB, kills=0)
    arguments = ("trainer=out-of-memory", f"memory={tmp_path / 'machine'}", "max_restarts=5")
    code, out, err = finish(launch(tmp_path, *arguments))
    assert code == 1
    assert out.count("restarting it") == 1
    assert "out of memory" in out
    assert "saving the checkpoint of step 2" in err  # what it was doing at its second end
