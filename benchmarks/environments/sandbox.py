"""What a sandbox costs: the start of its process, and a call, with and without bubblewrap.

    python -m benchmarks.environments.sandbox [--calls 60]

The kinds take turns, call by call, so that they share what else the machine does; a row has medians in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

from headrace.environments.isolation import SandboxSettings, apply_settings, bubblewrap_problem
from headrace.environments.rewards import CodeExecution
from headrace.environments.sandbox import Sandbox

SOLUTION = "```python\ndef add(a, b):\n    return a + b\n```"
TASK = {"tests": [{"input": [1, 2], "output": 3}]}
Call = Callable[[], Awaitable[Any]]


async def timed_ms(call: Call) -> float:
    began = time.perf_counter()
    await call()
    return 1000 * (time.perf_counter() - began)


def sandboxes(kind: str) -> dict[str, tuple[Sandbox | CodeExecution, Call]]:
    """Return by name what is measured for a kind of sandbox: the object to close, and one call."""
    apply_settings(SandboxSettings(kind=kind))  # type: ignore[arg-type]
    code = CodeExecution(entry="add", processes=1)
    pool = Sandbox(1, untrusted=True)
    return {
        f"a solution with one test, {kind}": (code, lambda: code(SOLUTION, TASK)),
        f"an untrusted function, {kind}": (pool, lambda: pool.call("math:sqrt", 2.0, timeout=60.0)),
    }


async def measure(calls: int) -> dict[str, list[float]]:
    """Return the milliseconds of all calls by what is called; the first one starts the process."""
    if (problem := bubblewrap_problem()) is not None:
        raise SystemExit(problem)
    plain = Sandbox(1)
    measured: dict[str, tuple[Sandbox | CodeExecution, Call]] = {
        "a checker": (plain, lambda: plain.call("math:sqrt", 2.0, timeout=60.0)),
        **sandboxes("rlimit"),
        **sandboxes("strict"),
    }
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(calls + 1):
        for name, (_, call) in measured.items():
            times[name].append(await timed_ms(call))
    for sandbox, _ in measured.values():
        await sandbox.close()
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=60)
    print(f"{'':40} first call   median   fastest tenth   (ms)")
    for name, (first, *others) in asyncio.run(measure(parser.parse_args().calls)).items():
        print(f"{name:40} {first:10.1f} {median(others):8.2f} {sorted(others)[len(others) // 10]:15.2f}")
