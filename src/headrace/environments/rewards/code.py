"""The answer is a program, or part of one, that passes the task's tests.

Every test runs in a process of its own: the solution first, then the test. It has limits on time, memory, files and
processes, an empty directory, no environment variables to speak of, and it is killed with all that it has started. A
solution that exits, prints what a test would, forks, fills its directory or never ends earns nothing by it. A test that
compares an output cannot be cheated by looking: the expected output stays here. An assertion and the solution share an
interpreter: that the assertion has passed is told with a random token, so that a solution has to search the frames of
its own interpreter to forge it.

This is no security boundary. A solution can read and write the files, and use the network, of the user who runs this:
with models that you do not trust, run the whole of it in a container.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.environments.rewards.base import gold_of
from headrace.environments.rewards.fences import last_block
from headrace.environments.sandbox import ONE_THREAD, Sandbox

RUNNER = Path(__file__).with_name("code_runner.py")
LANGUAGES = ("python", "py", "python3", "")
GRACE = 30.0
"""Seconds that starting and clearing up may take besides the tests' own time."""


class CodeExecution:
    """The share of tests that the last fenced code block of the text passes; with `all_or_nothing`, 1.0 or 0.0.

    The task has its tests under `tests_field`, a list: statements such as `assert add(1, 2) == 3`, or pairs of `input`
    and `output`. A pair is what a program reads and what it has to print, up to spaces at the ends of lines; or, with
    `entry`, the list of arguments of that function and what it has to return, as JSON. `entry` is the field of the task
    that names the function, or the name itself: `solve`, `Solution().solve`.

    `timeout` is in seconds and for all tests together; what has not passed by then has failed.
    """

    name = "code"
    bounded = True

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
        self._tests_field = tests_field
        self._entry = entry
        self._limits = {"timeout": timeout, "memory_mb": memory_mb, "disk_mb": disk_mb, "max_output": max_output}
        self._all_or_nothing = all_or_nothing
        self._sandbox = Sandbox(processes, memory_mb=None)

    async def __call__(self, text: str, data: Mapping[str, Any]) -> float:
        entry = None if self._entry is None else data.get(self._entry, self._entry)
        tests = gold_of(data, self._tests_field)
        tests = [_test(test, entry is not None) for test in ([tests] if isinstance(tests, str) else tests)]
        if not tests:
            raise ValueError(f"the task has no tests under {self._tests_field!r}")
        job = {"entry": entry, **self._limits}
        passed: list[bool] = await self._sandbox.call(
            f"{__name__}:run_tests", text, tests, job, timeout=self._limits["timeout"] + GRACE
        )
        return float(all(passed)) if self._all_or_nothing else sum(passed) / len(passed)

    async def close(self) -> None:
        await self._sandbox.close()


def _test(test: Any, has_entry: bool) -> dict[str, Any]:
    """What the runner has to know, and under `expected` what it must not."""
    match test:
        case str():
            return {"kind": "assert", "code": test}
        case {"input": list() as arguments, "output": expected} if has_entry:
            return {"kind": "call", "arguments": arguments, "expected": expected}
        case {"input": str() as given, "output": str() as expected} if not has_entry:
            return {"kind": "program", "input": given, "expected": expected}
    pair = "a list of arguments and a value" if has_entry else "two texts"
    raise ValueError(f"a test is a statement, or has `input` and `output` with {pair}; not {str(test)[:80]}")


def run_tests(text: str, tests: list[dict[str, Any]], job: dict[str, Any]) -> list[bool]:
    """What runs in the sandbox: which tests pass."""
    code = last_block(text, LANGUAGES)
    if code is None:
        return [False] * len(tests)
    expected = [test.pop("expected", None) for test in tests]
    status, answer = _run({"code": code, "tests": tests, **job})
    if status < 0:  # the solution has killed it
        return [False] * len(tests)
    if status > 0:
        raise RuntimeError(f"the program that runs tests ended with status {status}; its log says why")
    results: list[str | None] = json.loads(answer)
    return [
        result is not None and _agrees(test["kind"], result, wanted)
        for test, result, wanted in zip(tests, results, expected, strict=True)
    ]


def _run(job: dict[str, Any]) -> tuple[int, bytes]:
    """The exit status and the answer of the program that runs tests."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
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


def _agrees(kind: str, result: str, wanted: Any) -> bool:
    match kind:
        case "call":
            return bool(json.loads(result) == wanted)
        case "program":
            return _lines(result) == _lines(wanted)
    return not result


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
