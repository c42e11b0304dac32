"""The answer is a program, or part of one, that passes the task's tests.

Every test runs in a process of its own: the solution first, then the test. It has limits on time, memory, files and
processes, an empty directory, no environment variables to speak of, and it is killed with all that it has started. A
solution that exits, prints what a test would, forks, fills its directory, attacks the program that runs it or never
ends earns nothing by it, and costs no rollout. A test that compares an output cannot be cheated by looking: the
expected output stays here.

An assertion and the solution share an interpreter, and that can be cheated: by a solution whose functions return an
object that equals everything, by one that replaces what the assertion calls, or by one that takes the token which
tells that the assertion has passed out of the pipe in which it waits. Where that matters, use `entry` with pairs.

This is no security boundary. A solution can read and write the files, and use the network, of the user who runs this;
where the system refuses it a namespace of processes (see `code_runner`), it can also kill every process of that user.
With models that you do not trust, run the whole of it in a container.
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
GRACE = 30.0
"""Seconds that starting and clearing up may take besides the tests' own time."""


@register_with_part("code_execution_reward")
class CodeExecution(SandboxReward):
    """The share of tests that the last fenced code block passes; with `all_or_nothing`, 1.0 or 0.0.

    The task has its tests under `tests_field`, a list: statements such as `assert add(1, 2) == 3`, or pairs of `input`
    and `output`. A pair is what a program reads and what it has to print, up to spaces at the ends of lines; or, with
    `entry`, the list of arguments of that function and what it has to return, as JSON. `entry` is the field of the task
    that names the function, or the name itself: `solve`, `Solution().solve`.

    `timeout` is in seconds of CPU time for all tests together, which may take `CPU_BOUND_PATIENCE` times that by the
    clock; tests that have not passed by then have failed. `timeouts` counts the solutions that blocked even the program
    that runs the tests, `failures` those that crashed its process; both score nothing.
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
        if folder is not None:  # what a solution left there that had to be killed with the program that runs it
            await asyncio.to_thread(remove_tree, folder)

    async def _check_installation(self) -> None:
        """Else a broken installation would look like wrong answers."""
        if not self._works:
            easy = {"kind": "assert", "code": "assert True"}
            job = {**self._limits, "entry": None, "timeout": GRACE}
            if await self._run("```\npass\n```", [easy], job) != [True]:
                raise RuntimeError("the program that runs tests does not work: its log, above, says why")
            self._works = True

    async def _passed(self, text: str, tests: list[dict[str, Any]], job: dict[str, Any]) -> list[bool]:
        """Nothing, if the solution prevents an answer: that must not be worth more than a wrong solution."""
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
        limit = CPU_BOUND_PATIENCE * job["timeout"] + GRACE
        call = f"{__name__}:run_tests", text, tests, job, self._folder
        passed: list[bool] = await self._sandbox.call(*call, timeout=limit)
        return passed


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


def run_tests(text: str, tests: list[dict[str, Any]], job: dict[str, Any], folder: str) -> list[bool]:
    """What runs in the sandbox: which tests pass. It works in `folder`."""
    code = last_block(text, LANGUAGES)
    if code is None:
        return [False] * len(tests)
    expected = [test.pop("expected", None) for test in tests]
    status, answer = _run({"code": code, "tests": tests, **job}, folder)
    results = _read(answer, len(tests)) if status == 0 else [None] * len(tests)
    return [
        result is not None and _agrees(test["kind"], result, wanted)
        for test, result, wanted in zip(tests, results, expected, strict=True)
    ]


def _run(job: dict[str, Any], folder: str) -> tuple[int, bytes]:
    """The exit status and the answer of the program that runs tests. Nothing of it, or of the solution, is left."""
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


def _read(answer: bytes, count: int) -> list[str | None]:
    """What every test wrote; nothing, if the solution has got at the answer."""
    try:
        results = msgspec.json.decode(answer, type=list[str | None])
    except ValueError:
        results = []
    return results if len(results) == count else [None] * count


def _agrees(kind: str, result: str, wanted: Any) -> bool:
    match kind:
        case "call":
            try:
                return _same(json.loads(result), wanted)
            except (ValueError, RecursionError):  # no JSON, or more of it than can be read
                return False
        case "program":
            return _lines(result) == _lines(wanted)
    return not result


def _same(value: Any, wanted: Any) -> bool:
    """As Python compares, except that True is not 1."""
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
