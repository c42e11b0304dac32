"""Reward for code that passes the task's tests.

Every test runs in its own process: the solution first, then the test. The process has limits on time, memory, files and
processes, an empty directory and almost no environment variables, and is killed with all its descendants. A solution
that exits, prints what a test would, forks, fills its directory, attacks the runner or never ends fails its tests and
does not fail the rollout. A solution cannot read the expected output of a test: it stays in this process.

An assertion shares an interpreter with the solution, which can cheat: its functions may return an object that equals
everything, replace what the assertion calls, or take the token that reports success out of its pipe. Use `entry` with
pairs of input and output where that matters.

This is not a security boundary. A solution can read and write the files, and use the network, of the user that runs it;
where the system refuses a PID namespace (see `code_runner`), it can also kill every process of that user. Run untrusted
models in a container.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from headrace.environments.child_process import adopt_orphans, end_descendants
from headrace.environments.rewards.answers import last_block
from headrace.environments.rewards.base import Counts, Data, SandboxReward, gold_of
from headrace.environments.rewards.code_runner import remove_tree
from headrace.environments.rewards.registry import register_with_part
from headrace.environments.sandbox import CPU_BOUND_PATIENCE, ONE_THREAD, CallFailed, CallTimeout, Sandbox

RUNNER = Path(__file__).with_name("code_runner.py")
LANGUAGES = ("python", "py", "python3", "")
GRACE_S = 30.0
"""Time for starting and cleaning up, besides the tests' own time."""


@register_with_part("code_execution_reward")
class CodeExecution(SandboxReward):
    """The share of tests that the last fenced code block passes; with `all_or_nothing`, 1.0 or 0.0.

    The task's `tests_field` is a list of tests: statements such as `assert add(1, 2) == 3`, or pairs of `input` and
    `output`. A pair is the standard input and output of a program, ignoring spaces at the ends of lines; or, with
    `entry`, the list of arguments and the return value of that function, as JSON. `entry` is the field of the task that
    names the function, or the name itself: `solve`, `Solution().solve`.

    `timeout` is in seconds of processor time for all tests together; by the clock they may take ten times that.
    Tests that have not passed by then have failed. A solution that blocks or kills the runner scores 0 and is counted
    in `counts`, as `timeouts` or `failures`.
    """

    name = "code"

    def __init__(
        self,
        tests_field: str = "tests",
        entry: str | None = None,
        timeout: float = 5.0,
        memory_mb: int = 512,
        disk_mb: int = 16,
        max_output: int = 1 << 20,
        all_or_nothing: bool = False,
        processes: int = 2,
    ) -> None:
        too_long = "solutions that blocked the program that runs the tests"
        failed = "solutions that ended the process that runs the tests"
        super().__init__(timeout, processes, Counts(self.name, timeouts=too_long, failures=failed))
        self._tests_field = tests_field
        self._entry = entry
        self._limits = {
            "timeout": timeout,
            "patience": CPU_BOUND_PATIENCE,
            "memory_mb": memory_mb,
            "disk_mb": disk_mb,
            "max_output": max_output,
        }
        self._all_or_nothing = all_or_nothing
        self._sandbox = Sandbox(processes, memory_mb=None)
        self._folder: str | None = None
        self._works = False

    async def __call__(self, text: str, data: Data) -> float:
        entry = None if self._entry is None else data.get(self._entry, self._entry)
        tests = gold_of(data, self._tests_field)
        tests = [_test(test, entry is not None) for test in ([tests] if isinstance(tests, str) else tests)]
        if not tests:
            raise ValueError(f"the task has no tests under {self._tests_field!r}")
        await self._check_installation()
        passed = await self._passed(text, tests, {"entry": entry, **self._limits})
        return float(len(passed) == len(tests) and all(passed)) if self._all_or_nothing else sum(passed) / len(tests)

    async def close(self) -> None:
        await super().close()
        folder, self._folder = self._folder, None
        if folder is not None:  # a solution that was killed with the runner may have left files
            await asyncio.to_thread(remove_tree, folder)

    async def _check_installation(self) -> None:
        """Run a trivial test once: with a broken installation all solutions would seem to fail."""
        if not self._works:
            easy = {"kind": "assert", "code": "assert True"}
            job = {**self._limits, "entry": None, "timeout": GRACE_S}
            if await self._run("```\npass\n```", [easy], job) != [True]:
                raise RuntimeError("the test runner does not work; see its log above")
            self._works = True

    async def _passed(self, text: str, tests: list[dict[str, Any]], job: dict[str, Any]) -> list[bool]:
        """Return which tests pass; an empty list if the solution stops the runner."""
        try:
            return await self._run(text, tests, job)
        except CallTimeout:
            self.counts.add("timeouts")
        except CallFailed as error:
            if error.kind != "process":
                raise
            self.counts.add("failures")
        return []

    async def _run(self, text: str, tests: list[dict[str, Any]], job: dict[str, Any]) -> list[bool]:
        self._folder = self._folder or tempfile.mkdtemp(prefix="headrace-code-")
        limit = CPU_BOUND_PATIENCE * job["timeout"] + GRACE_S
        call = f"{__name__}:run_tests", text, tests, job, self._folder
        passed: list[bool] = await self._sandbox.call(*call, timeout=limit)
        return passed


def _test(test: Any, has_entry: bool) -> dict[str, Any]:
    """Return a test for the runner, and under `expected` what the runner must not see."""
    match test:
        case str():
            return {"kind": "assert", "code": test}
        case {"input": list() as arguments, "output": expected} if has_entry:
            return {"kind": "call", "arguments": arguments, "expected": expected}
        case {"input": str() as stdin, "output": str() as expected} if not has_entry:
            return {"kind": "program", "input": stdin, "expected": expected}
    pair = "a list of arguments and a value" if has_entry else "two texts"
    raise ValueError(f"a test is a statement, or has `input` and `output` with {pair}; not {str(test)[:80]}")


def run_tests(text: str, tests: list[dict[str, Any]], job: dict[str, Any], folder: str) -> list[bool]:
    """Return which tests pass; runs in the sandbox, with temporary files in `folder`."""
    code = last_block(text, LANGUAGES)
    if code is None:
        return [False] * len(tests)
    expected = [test.pop("expected", None) for test in tests]
    status, answer = _run({"code": code, "tests": tests, **job}, folder)
    try:
        results = msgspec.json.decode(answer, type=list[str | None]) if status == 0 else []
    except ValueError:  # the solution has written there
        results = []
    if len(results) != len(tests):
        return [False] * len(tests)
    return [
        result is not None and _agrees(test["kind"], result, wanted)
        for test, result, wanted in zip(tests, results, expected, strict=True)
    ]


def _run(job: dict[str, Any], folder: str) -> tuple[int, bytes]:
    """Return the exit status and the output of the runner, after ending all its processes and removing its files."""
    adopt_orphans()
    os.makedirs(folder, exist_ok=True)  # a solution may have removed it
    directory = tempfile.mkdtemp(dir=folder)
    try:
        runner = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", str(RUNNER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.defpath, "TMPDIR": directory, **ONE_THREAD},
            start_new_session=True,
        )
        assert runner.stdin is not None and runner.stdout is not None
        with runner:
            runner.stdin.write(json.dumps(job).encode() + b"\n")
            runner.stdin.flush()  # and left open: the runner ends, with all that it runs, when this process does
            answer = runner.stdout.read()
            return runner.wait(), answer
    finally:
        end_descendants()
        remove_tree(directory)


def _agrees(kind: str, result: str, wanted: Any) -> bool:
    match kind:
        case "call":
            try:
                return _same(json.loads(result), wanted)
            except (ValueError, RecursionError):  # not JSON, or too deep to parse
                return False
        case "program":
            return _lines(result) == _lines(wanted)
    return not result


def _same(value: Any, wanted: Any) -> bool:
    """Compare as Python does, except that True is not 1."""
    match value, wanted:
        case (bool(), _) | (_, bool()):
            return value is wanted
        case list(), list():
            return len(value) == len(wanted) and all(map(_same, value, wanted))
        case dict(), dict():
            return value.keys() == wanted.keys() and all(_same(value[key], wanted[key]) for key in value)
    return bool(value == wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
