"""One engine with one model in a process of its own: jobs in, seconds out, one line of JSON each.

    python -m benchmarks.inference.worker ENGINE MODEL OPTIONS

The comparison starts one for every engine, with that engine's Python, and asks them in turn. Every engine module has
a class `Contender` with `run(jobs, concurrent)`, which returns the seconds by the clock and by the processor from the
moment when the first request is handed over to the moment when the last is answered.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.inference.loads import Job

ROOT = Path(__file__).parents[2]


class Seconds(NamedTuple):
    """What a run took."""

    wall: float
    cpu: float


class Stopwatch:
    """Clock and processor time of this process, all threads."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def read(self) -> Seconds:
        return Seconds(time.perf_counter() - self._start[0], time.process_time() - self._start[1])


class Worker:
    """The comparison's side of it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, jobs: list[Job], concurrent: int) -> Seconds:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([concurrent, jobs]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{' '.join(self._process.args)} has died")  # type: ignore[arg-type]
        return Seconds(*json.loads(answer))


@contextmanager
def running(
    engine: str, model: Path, options: dict[str, Any], *, python: str, environment: dict[str, str]
) -> Iterator[Worker]:
    """A worker that is started here and ends with the block."""
    command = [python, "-m", "benchmarks.inference.worker", engine, str(model), json.dumps(options)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Worker(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def main(engine: str, model: str, options: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints
    contender = importlib.import_module(f"benchmarks.inference.{engine}").Contender(model, **json.loads(options))
    for line in sys.stdin:
        concurrent, jobs = json.loads(line)
        seconds = contender.run([Job(*job) for job in jobs], concurrent)
        print(json.dumps(seconds), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
