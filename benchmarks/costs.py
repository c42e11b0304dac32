"""What trust costs, in one table: digests, text that cannot forge turns or terminal output, and the sandbox.

    python -m benchmarks.costs [MB of a checkpoint]

Each row is with and without, measured in turn. `share` is the part of the time with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from statistics import median

from benchmarks.environments import sandbox
from benchmarks.orchestrator import rendering
from benchmarks.weights import digests
from benchmarks.weights.digests import TITLE, Cost

from headrace.safe_text import _EscapedStream

LINES = 1000
RENDERING_S, REPEATS = 1.0, 20
CALLS = 40
STRICT, FALLBACK = "strict", "rlimit"


def of_logs() -> Iterator[Cost]:
    """Log lines of 120 characters to a file, through the stream that escapes and without it."""
    with open(os.devnull, "w") as file:
        handlers = [logging.StreamHandler(stream) for stream in (_EscapedStream(file), file)]  # type: ignore[type-var]
        record = logging.LogRecord("headrace", logging.INFO, "", 0, 120 * "x", None, None)

        def write(handler: logging.Handler) -> None:
            for _ in range(LINES):
                handler.emit(record)

        both = partial(write, handlers[0]), partial(write, handlers[1])
        yield next(digests.compare(f"log {LINES} lines of 120 characters", both, digests.REPEATS))


def costs(size_mb: int) -> Iterator[Cost]:
    yield from digests.costs(size_mb)
    for name, _, plain, safe in rendering.rates(RENDERING_S, REPEATS):
        yield Cost(f"render {name}, CPU time", 1e3 / safe, 1e3 / plain)
    yield from of_logs()
    calls = asyncio.run(sandbox.measure(CALLS))
    for name in calls:
        if name.endswith(STRICT):
            kinds = name, name.replace(STRICT, FALLBACK)
            yield Cost(f"{name} and {FALLBACK}, wall time", *(median(calls[kind][1:]) for kind in kinds))


if __name__ == "__main__":
    print(TITLE)
    for cost in costs(int(sys.argv[1]) if len(sys.argv) > 1 else 512):
        print(cost, flush=True)
