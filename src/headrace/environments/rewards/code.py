"""Reward for code that passes the task's tests.

Every solution has its own program that runs the tests (`code_runner.py`), inside bubblewrap where that works
(`isolation.py`) and in a container where the task brings an image. Every test runs in its own process there: the
solution first, then the test. The process has limits on time, memory, files and processes, an empty directory and
almost no environment variables, and is killed with all its descendants. A solution that exits, prints what a test
would, forks, fills its directory, attacks the runner or never ends fails its tests and does not fail the rollout. A
solution cannot read the expected output of a test: it stays outside.

An assertion shares an interpreter with the solution, which can cheat: its functions may return an object that equals
everything, replace what the assertion calls, or take the token that reports success out of its pipe. Use `entry` with
pairs of input and output where that matters.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.environments import isolation
from headrace.environments.arguments import BadArgument
from headrace.environments.child_process import ONE_THREAD, adopt_orphans
from headrace.environments.code_runner import end_descendants, remove_tree
from headrace.environments.rewards.answers import last_block
from headrace.environments.rewards.base import Counts, Data, SandboxReward, gold_of, register_with_part
from headrace.environments.sandbox import WALL_FACTOR, CallFailed, CallTimeout, Sandbox

RUNNER = str(Path(__file__).parents[1] / "code_runner.py")
RUNNER_INSIDE = "/code_runner.py"
LANGUAGES = ("python", "py", "python3", "")
GRACE_S = 30.0
"""Time for starting and cleaning up, besides the tests' own time."""
READ_BYTES, MAX_ESCAPED_BYTES = 1 << 16, 6
"""The runner reads a test's output in blocks of this size; JSON needs up to this many bytes for one of them."""
OVERHEAD_MB = 64
"""Memory of the interpreter and the runner, besides what a solution may use."""


@register_with_part("code_execution_reward")
class CodeExecution(SandboxReward):
    """The share of tests that the last fenced code block passes; with `all_or_nothing`, 1.0 or 0.0.

    The task's `tests_field` is a list of tests: statements such as `assert add(1, 2) == 3`, or pairs of `input` and
    `output`. A pair is the standard input and output of a program, ignoring spaces at the ends of lines; or, with
    `entry`, the list of arguments and the return value of that function, as JSON. `entry` is the field of the task that
    names the function, or the name itself: `solve`, `Solution().solve`.

    `timeout` is in seconds of processor time for all tests together; by the clock they may take ten times that.
    Tests that have not passed by then have failed. A solution that blocks or kills the runner scores 0 and is counted
    in `counts`, as `timeouts` or `failures`. Limits above those of `[environments.sandbox]` are lowered to them.

    `image_field` is the field of the task that names a container image with `python3`, for podman; the image must have
    been pulled. Tasks without the field run in this interpreter.
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
        image_field: str | None = None,
    ) -> None:
        if image_field is not None and shutil.which("podman") is None:
            fact = "tasks with images need podman, which is not installed"
            raise BadArgument(fact, key="image_field", value=image_field, fix="Install podman.")
        settings = isolation.current_settings()
        too_long = "solutions that blocked the program that runs the tests"
        failed = "solutions that ended the process that runs the tests"
        super().__init__(timeout, processes, Counts(self.name, timeouts=too_long, failures=failed))
        self._tests_field = tests_field
        self._entry = entry
        self._image_field = image_field
        self._limits = {
            "timeout": min(timeout, settings.cpu_s),
            "wall_factor": WALL_FACTOR,
            "memory_mb": min(memory_mb, settings.memory_mb),
            "disk_mb": disk_mb,
            "max_output": min(max_output, settings.output_mb << 20),
            "processes": settings.processes,
            "contained": isolation.register_untrusted("solution"),
            "filter": isolation.filter_hex(),
        }
        self._all_or_nothing = all_or_nothing
        self._sandbox = Sandbox(processes, memory_mb=None)
        self._folder: str | None = None
        self._working_images: set[str | None] = set()

    async def __call__(self, text: str, data: Data) -> float:
        entry = None if self._entry is None else data.get(self._entry, self._entry)
        tests = gold_of(data, self._tests_field)
        tests = [_parse_test(test, entry is not None) for test in ([tests] if isinstance(tests, str) else tests)]
        if not tests:
            raise ValueError(f"the task has no tests under {self._tests_field!r}")
        image = None if self._image_field is None else data.get(self._image_field)
        await self._check_installation(image)
        passed = []  # stays empty if the solution stops the runner
        try:
            passed = await self._run(text, tests, {"entry": entry, "image": image, **self._limits})
        except CallTimeout:
            self.counts.add("timeouts")
        except CallFailed as error:
            if error.kind != "process":
                raise
            self.counts.add("failures")
        return float(len(passed) == len(tests) and all(passed)) if self._all_or_nothing else sum(passed) / len(tests)

    async def close(self) -> None:
        await super().close()
        folder, self._folder = self._folder, None
        if folder is not None:  # a solution that was killed with the runner may have left files
            await asyncio.to_thread(remove_tree, folder)

    async def _check_installation(self, image: str | None) -> None:
        """Run a trivial test once: with a broken installation, or no such image, all solutions would seem to fail."""
        if image not in self._working_images:
            easy = {"kind": "assert", "code": "assert True"}
            job = {**self._limits, "entry": None, "image": image, "timeout": GRACE_S}
            if await self._run("```\npass\n```", [easy], job) != [True]:
                raise RuntimeError("the test runner does not work; see its log above")
            self._working_images.add(image)

    async def _run(self, text: str, tests: list[dict[str, Any]], job: dict[str, Any]) -> list[bool]:
        """Return which tests pass. Raises `CallTimeout` or `CallFailed` if the solution stops the runner."""
        self._folder = self._folder or tempfile.mkdtemp(prefix="headrace-code-")
        limit = WALL_FACTOR * job["timeout"] + GRACE_S
        call = f"{__name__}:run_tests", text, tests, job, self._folder
        passed: list[bool] = await self._sandbox.call(*call, timeout=limit)
        return passed


def _parse_test(test: Any, has_entry: bool) -> dict[str, Any]:
    """Return a test for the runner. Its `expected` output is removed before the runner gets the test."""
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
    status, answer = _start_runner({"code": code, "tests": tests, **job}, folder)
    try:
        results = msgspec.json.decode(answer, type=list[str | None]) if status == 0 else []
    except ValueError:  # the solution has written to the runner's output
        results = []
    if len(results) != len(tests):
        return [False] * len(tests)
    return [
        result is not None and _is_expected(test["kind"], result, wanted)
        for test, result, wanted in zip(tests, results, expected, strict=True)
    ]


def _start_runner(job: dict[str, Any], folder: str) -> tuple[int, bytes]:
    """Return the exit status and the output of the runner, after ending all its processes and removing its files."""
    adopt_orphans()
    os.makedirs(folder, exist_ok=True)  # a solution may have removed it
    directory = tempfile.mkdtemp(dir=folder)
    max_bytes = len(job["tests"]) * MAX_ESCAPED_BYTES * (job["max_output"] + READ_BYTES)
    memory_mb = job["memory_mb"] + 2 * job["disk_mb"] + OVERHEAD_MB
    group = isolation.make_cgroup(memory_mb, job["processes"]) if job["contained"] and not job["image"] else None
    try:
        command, variables = _build_command(job, directory)
        runner = subprocess.Popen(
            group.command(command) if group else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            start_new_session=True,
        )
        assert runner.stdin is not None and runner.stdout is not None
        with runner:
            runner.stdin.write(json.dumps(job).encode() + b"\n")
            runner.stdin.flush()  # and left open: the runner ends when its input closes
            answer = runner.stdout.read(max_bytes)
            return runner.wait(), answer
    finally:
        end_descendants()
        remove_tree(directory)
        if group:
            group.remove()


def _build_command(job: dict[str, Any], directory: str) -> tuple[list[str], Mapping[str, str]]:
    """Return the runner's command line and environment variables, and complete its job."""
    python, files = ["python3", "-I", "-X", "utf8", RUNNER_INSIDE], {RUNNER_INSIDE: RUNNER}
    disk_mb = job["disk_mb"] + 1 + max(4 * len(test.get("input", "")) >> 20 for test in job["tests"])
    if job["image"]:
        job |= {"contained": True, "user": None}  # podman sets the user
        limits = {"memory_mb": job["memory_mb"], "processes": job["processes"]}
        return isolation.podman_command(job["image"], python, files, disk_mb=disk_mb, **limits), os.environ
    python[0] = sys.executable
    job |= isolation.choose_users(contained=job["contained"])
    if job["contained"]:
        return isolation.bubblewrap_command(python, files, user=job["user"], disk_mb=disk_mb), os.environ
    return [*python[:-1], RUNNER], {"PATH": os.defpath, "TMPDIR": directory, **ONE_THREAD}


def _is_expected(kind: str, result: str, expected: Any) -> bool:
    """Return whether a test's result, as the runner sent it, is the expected one."""
    match kind:
        case "call":
            try:
                return _is_equal(json.loads(result), expected)
            except (ValueError, RecursionError):  # not JSON, or too deep to parse
                return False
        case "program":
            return _strip_lines(result) == _strip_lines(expected)
    return not result


def _is_equal(value: Any, expected: Any) -> bool:
    """Return whether two values are equal as in Python, except that True is not 1."""
    match value, expected:
        case (bool(), _) | (_, bool()):
            return value is expected
        case list(), list():
            return len(value) == len(expected) and all(map(_is_equal, value, expected))
        case dict(), dict():
            return value.keys() == expected.keys() and all(_is_equal(value[key], expected[key]) for key in value)
    return bool(value == expected)


def _strip_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
