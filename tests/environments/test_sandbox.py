"""Functions in processes that can be killed: real processes that work, hang and die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.environments.sandbox import CallFailed, CallTimeout, Sandbox
from tests.environments.heartbeat import ticks_during
from tests.environments.sandbox_functions import NAME
from tests.environments.test_workers import ROOT, until, wait_for_lock

pytestmark = pytest.mark.asyncio(loop_scope="module")  # starting a process takes longest: most tests share one
AMPLE = 60.0
LIMITED = pytest.mark.skipif(
    sys.platform != "linux", reason="the system neither limits memory nor tells what a process does"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    sandbox = Sandbox(1, memory_mb=256)
    yield sandbox
    await sandbox.close()


async def call(sandbox: Sandbox, function: str, *args: Any, timeout: float = AMPLE) -> Any:
    return await sandbox.call(f"{NAME}:{function}", *args, timeout=timeout)


async def pid_of(sandbox: Sandbox) -> int:
    return int(await sandbox.call("os:getpid", timeout=AMPLE))


async def test_a_call_gives_what_the_function_returns(sandbox: Sandbox):
    value = {"texts": ["", "ä\x00\u2028"], "numbers": [1, -2.5, True, None], "bytes": b"\xff"}
    assert await call(sandbox, "same", value) == value
    assert await pid_of(sandbox) != os.getpid()


async def test_ten_megabytes_travel_both_ways(sandbox: Sandbox):
    text = "0123456789" * 1_000_000
    assert await call(sandbox, "same", text) == text


async def test_texts_with_lone_surrogates_travel_both_ways(sandbox: Sandbox):
    value = {"a": ["\ud800", "plain", {"b": "x\udfffy"}]}
    assert await call(sandbox, "same", value) == value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "TypeError.*:same"),
        (1 << 70, "OverflowError.*:same"),
        ({"\ud800": 1}, "UnicodeEncodeError.*:same"),
    ],
)
async def test_an_argument_that_cannot_travel_is_refused(sandbox: Sandbox, value: Any, words: str):
    with pytest.raises(CallFailed, match=words):
        await call(sandbox, "same", value)


async def test_an_argument_that_is_too_deep_is_refused(sandbox: Sandbox):
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CallFailed, match="RecursionError"):
        await call(sandbox, "same", deep)


async def test_a_result_that_cannot_travel_is_refused_and_the_process_stays(sandbox: Sandbox):
    before = await pid_of(sandbox)
    with pytest.raises(CallFailed, match="TypeError: object"):
        await sandbox.call("builtins:object", timeout=AMPLE)
    with pytest.raises(CallFailed, match="ValueError"):
        await sandbox.call("numpy:zeros", 3, timeout=AMPLE)
    assert await pid_of(sandbox) == before


async def test_an_exception_says_what_it_was_and_where_and_the_process_stays(sandbox: Sandbox):
    before = await pid_of(sandbox)
    with pytest.raises(CallFailed) as failure:
        await call(sandbox, "mumble")
    assert (failure.value.kind, failure.value.text) == ("ValueError", r"a lone surrogate: \ud800")
    assert "sandbox_functions.py" in failure.value.remote_traceback
    with pytest.raises(CallFailed, match="RecursionError"):
        await call(sandbox, "recurse")
    with pytest.raises(CallFailed, match="SystemExit: 3"):
        await sandbox.call("sys:exit", 3, timeout=AMPLE)
    assert await pid_of(sandbox) == before


async def test_a_function_that_cannot_be_imported_is_named(sandbox: Sandbox):
    with pytest.raises(CallFailed, match="no_such_package:name"):
        await sandbox.call("no_such_package:name", timeout=AMPLE)
    with pytest.raises(CallFailed, match='"len"'):
        await sandbox.call("len", timeout=AMPLE)


@LIMITED
async def test_a_call_that_wants_too_much_memory_fails_and_the_process_stays(sandbox: Sandbox):
    before = await pid_of(sandbox)
    with pytest.raises(CallFailed, match="MemoryError"):
        await call(sandbox, "want_memory", 512)
    assert await call(sandbox, "want_memory", 50) == 50 << 20
    assert await pid_of(sandbox) == before


@LIMITED
@pytest.mark.full
async def test_a_process_that_keeps_its_memory_is_replaced(sandbox: Sandbox):
    before = await pid_of(sandbox)
    with pytest.raises(CallFailed, match="MemoryError"):
        await call(sandbox, "keep_memory", 50)
    assert await pid_of(sandbox) != before


@pytest.mark.parametrize(
    ("function", "argument", "words"),
    [
        ("os:_exit", 0, "status 0"),
        ("ctypes:string_at", 0, "SIGSEGV"),
    ],
)
async def test_a_process_that_dies_says_how_and_is_replaced(sandbox: Sandbox, function: str, argument: int, words: str):
    before = await pid_of(sandbox)
    with pytest.raises(CallFailed, match=words) as failure:
        await sandbox.call(function, argument, timeout=AMPLE)
    assert failure.value.kind == "process"
    assert await pid_of(sandbox) != before


async def test_a_call_that_takes_too_long_is_killed_with_all_it_has_started(sandbox: Sandbox, tmp_path: Path):
    lock = tmp_path / "lock"
    lock.touch()
    before = await pid_of(sandbox)
    with pytest.raises(CallTimeout, match=r"leave_a_process_and_hang.*0\.3 s"):
        await call(sandbox, "leave_a_process_and_hang", str(lock), str(tmp_path / "started"), timeout=0.3)
    wait_for_lock(lock)
    assert await pid_of(sandbox) != before


async def test_a_cancelled_call_is_killed_with_all_it_has_started(sandbox: Sandbox, tmp_path: Path):
    lock, started = tmp_path / "lock", tmp_path / "started"
    lock.touch()
    calling = asyncio.create_task(call(sandbox, "leave_a_process_and_hang", str(lock), str(started)))
    await until(started.exists)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    wait_for_lock(lock)
    assert await pid_of(sandbox)


async def test_a_call_cancelled_while_its_process_starts_leaves_nothing_behind(sandbox: Sandbox):
    await sandbox.close()
    starting = asyncio.create_task(pid_of(sandbox))
    await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    [process] = sandbox._processes
    await process.ended()
    assert await pid_of(sandbox)
    assert process not in sandbox._processes


async def test_code_that_holds_the_interpreter_leaves_the_event_loop_here_free(sandbox: Sandbox):
    async def match() -> str:
        with pytest.raises(CallTimeout) as failure:
            await sandbox.call("re:fullmatch", "(a+)+$", "a" * 40 + "!", timeout=0.3)
        return str(failure.value)

    words, ticks = await ticks_during(match())
    assert words == "re:fullmatch took longer than 0.3 s"
    assert ticks > 30


@LIMITED
async def test_with_a_wall_factor_processor_time_counts_first_and_the_clock_in_the_end(sandbox: Sandbox):
    assert await sandbox.call("time:sleep", 0.3, timeout=0.1, wall_factor=100.0) is None
    with pytest.raises(CallTimeout, match=r"time:sleep.*0\.05 s"):
        await sandbox.call("time:sleep", 60, timeout=0.05, wall_factor=4.0)
    with pytest.raises(CallTimeout):
        await sandbox.call("re:fullmatch", "(a+)+$", "a" * 40 + "!", timeout=0.1, wall_factor=10_000.0)


@LIMITED
async def test_a_cancelled_call_ends_what_has_left_its_session(sandbox: Sandbox, tmp_path: Path):
    pid_file = tmp_path / "pid_file"
    pid_file.touch()
    command = ["setsid", "sh", "-c", f"echo $$ > {pid_file}; exec sleep 3600"]
    calling = asyncio.create_task(sandbox.call("subprocess:call", command, timeout=AMPLE))
    await until(lambda: pid_file.read_text().endswith("\n"))
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await until(lambda: not is_running(int(pid_file.read_text())))


async def test_waiting_for_a_free_process_does_not_count(sandbox: Sandbox, tmp_path: Path):
    started, stop = tmp_path / "started", tmp_path / "stop"
    first = asyncio.create_task(call(sandbox, "spin_until", str(started), str(stop)))
    await until(started.exists)
    second = asyncio.create_task(call(sandbox, "same", 1, timeout=0.3))
    await asyncio.sleep(0.4)
    stop.touch()
    assert await second == 1
    assert await first


async def test_an_answer_that_came_while_the_event_loop_was_busy_is_in_time(sandbox: Sandbox):
    await call(sandbox, "same", 0)
    calling = asyncio.create_task(call(sandbox, "same", 1, timeout=0.2))
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 - something else holds the event loop up
    assert await calling == 1


async def test_calls_share_as_many_processes_as_there_may_be(tmp_path: Path):
    sandbox = Sandbox(2)
    started = [tmp_path / str(number) for number in range(5)]
    stop = tmp_path / "stop"
    calls = [asyncio.create_task(call(sandbox, "spin_until", str(path), str(stop))) for path in started]
    await until(lambda: sum(path.exists() for path in started) == 2)
    stop.touch()
    assert len(set(await asyncio.gather(*calls))) == 2
    await sandbox.close()


async def test_a_sandbox_starts_with_its_first_call_and_again_after_its_end():
    sandbox = Sandbox(1)
    assert sandbox._processes == []
    first = await pid_of(sandbox)
    await sandbox.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert await pid_of(sandbox) != first
    await sandbox.close()
    await sandbox.close()


async def test_closing_fails_the_calls_that_run_and_those_that_wait(sandbox: Sandbox, tmp_path: Path):
    started = tmp_path / "started"
    running = asyncio.create_task(call(sandbox, "spin_until", str(started), str(tmp_path / "never")))
    await until(started.exists)
    waiting = asyncio.create_task(pid_of(sandbox))
    await asyncio.sleep(0)
    await sandbox.close()
    with pytest.raises(CallFailed, match="closed") as failure:
        await running
    assert failure.value.kind == "closed"
    with pytest.raises(CallFailed, match="closed"):
        await waiting


async def test_a_process_killed_while_it_has_nothing_to_do_is_replaced(sandbox: Sandbox, tmp_path: Path):
    lock = tmp_path / "lock"
    lock.touch()
    await call(sandbox, "hold", str(lock))
    before = await pid_of(sandbox)
    os.kill(before, signal.SIGKILL)
    wait_for_lock(lock)
    await asyncio.sleep(0.01)
    assert await pid_of(sandbox) != before


async def test_a_process_reads_nothing_and_may_run_an_event_loop_and_ignores_ctrl_c(sandbox: Sandbox):
    assert await call(sandbox, "read_input") == ""
    assert await call(sandbox, "run_event_loop") == 7
    before = await pid_of(sandbox)
    os.kill(before, signal.SIGINT)
    assert {await pid_of(sandbox) for _ in range(5)} == {before}


@pytest.mark.full
async def test_a_sandbox_serves_one_event_loop_after_another_closed_or_not():
    sandbox = Sandbox(1)

    async def closing() -> int:
        pid = await pid_of(sandbox)
        await sandbox.close()
        return pid

    def in_three_loops() -> list[int]:
        return [asyncio.run(pid_of(sandbox)), asyncio.run(closing()), asyncio.run(closing())]

    pids = await asyncio.to_thread(in_three_loops)
    assert len(set(pids)) == 3
    with pytest.raises(ProcessLookupError):
        os.kill(pids[1], 0)
    await until(lambda: not is_running(pids[0]))


def is_running(pid: int) -> bool:
    """Whether it is there, and not just waiting to be reaped."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="the system does not list descriptors")
async def test_a_killed_process_leaves_no_descriptor_open(sandbox: Sandbox):
    await pid_of(sandbox)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CallTimeout):
        await sandbox.call("time:sleep", 60, timeout=0.05)
    await pid_of(sandbox)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("processes", [0, -3])
async def test_a_sandbox_without_processes_is_refused_with_their_number(processes: int):
    with pytest.raises(ValueError, match=f"processes = {processes}:"):
        Sandbox(processes)


PARENT = """
import asyncio, sys
from headrace.environments.sandbox import Sandbox
asyncio.run(Sandbox().call("tests.environments.sandbox_functions:backtrack_for_ever", sys.argv[1], timeout=3600))
"""


async def test_a_process_ends_with_its_parent_even_in_code_that_lets_nothing_else_run(tmp_path: Path):
    lock = tmp_path / "lock"
    lock.touch()
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(lock)), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"locked\n"
    parent.kill()
    await parent.wait()
    wait_for_lock(lock)
