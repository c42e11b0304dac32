"""The tasks of a reasoning-gym family, made by a separate process.

Several families draw from sets of texts, whose order differs between processes, or from Python's global random
generator: in that process both are fixed, so that a resumed run has the same tasks. What a family prints, imports or
seeds, and a call that never returns, also stay in that process.

A question is in `eval` or in `train` by a checksum of its text, so that no question is in both, whatever the seeds and
settings. A family's scorer is not trusted: a task whose gold answer does not score 1 is left out, and a family with
mostly such tasks is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from headrace.environments.adapters.reasoning_gym_family import Family, as_task, score
from headrace.environments.child_process import connect_to_parent, describe_exit
from headrace.environments.fault import fault_of
from headrace.environments.sandbox import ONE_THREAD
from headrace.errors import BadInput

log = logging.getLogger(__name__)

PROGRAM = "from headrace.environments.adapters.reasoning_gym_tasks import main; main()"
SAME_ORDER = {"PYTHONHASHSEED": "0"}
EVAL_SHARE = 4
"""One question in this many is in `eval`. Not fewer: some families take a second for a question."""
DATASET_SIZE = 500
"""Entries of one dataset, which some families make all at once."""
MAX_FUTILE_DRAWS = 200
"""Draws in a row without a new question after which there are assumed to be no more."""
MIN_DRAWS_TO_REFUSE = 16
"""Draws after which a family is refused if half of its tasks cannot be used."""
QUICK_S = 0.02
"""A task that takes less time is made twice, and left out if the two differ, as where code reads a clock."""
STALL_TIMEOUT_S = 300.0
"""Time without a new task after which the family is refused."""
FIRST_PROGRESS_S = 10.0
"""Time before the first progress message; the interval then doubles."""


class Request(msgspec.Struct):
    family: str
    settings: dict[str, Any]
    split: str
    num_tasks: int
    seed: int


class Made(msgspec.Struct, tag=True):
    task: dict[str, Any]


class Refused(msgspec.Struct, tag=True):
    """The fields of a `BadInput`."""

    fact: str
    key: str | None
    value: Any
    fix: str | None


class Finished(msgspec.Struct, tag=True):
    left_out: int
    why: str
    """The problem of the first of those."""


Line = Made | Refused | Finished


def tasks_of_family(request: Request) -> list[dict[str, Any]]:
    """Return the tasks in a stable order, all questions different; fewer than requested where there are no more."""
    with tempfile.TemporaryDirectory() as scratch:  # some families run code that writes files
        return _tasks_from_process(request, scratch)


def _tasks_from_process(request: Request, folder: str) -> list[dict[str, Any]]:
    ours, theirs = socket.socketpair()
    watched, lifeline = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(theirs.fileno()), str(watched)],
        pass_fds=(theirs.fileno(), watched),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd=folder,
        env={**os.environ, **ONE_THREAD, **SAME_ORDER},
        start_new_session=True,  # it ends with whatever it has started
    )
    theirs.close()
    os.close(watched)
    try:
        ours.sendall(msgspec.json.encode(request) + b"\n")
        return _received(request, ours, process)
    finally:
        ours.close()
        os.close(lifeline)
        process.kill()
        process.wait()


def _received(request: Request, ours: socket.socket, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
    name, started, next_report = f"reasoning-gym:{request.family}", time.monotonic(), FIRST_PROGRESS_S
    tasks: list[dict[str, Any]] = []
    ours.settimeout(STALL_TIMEOUT_S)
    try:
        for line in ours.makefile("rb"):
            match decoder.decode(line):
                case Made(task):
                    tasks.append(task)
                case Refused(fact, key, value, fix):
                    raise BadInput(fact, key=key, value=value, fix=fix)
                case Finished(left_out, why):
                    _warn_of_shortage(name, request, len(tasks), left_out, why)
                    return tasks
            if (elapsed := time.monotonic() - started) > next_report:
                next_report = 2 * elapsed
                log.info("%s: %d of %d tasks made in %.0f s", name, len(tasks), request.num_tasks, elapsed)
    except TimeoutError as error:
        raise BadInput(
            f"{name} made {len(tasks)} tasks, then none for {STALL_TIMEOUT_S:g} s, with {request.settings}",
            key="args.num_tasks",
            value=request.num_tasks,
            fix="Lower num_tasks, or choose easier settings.",
        ) from error
    raise BadInput(f"the process that makes the tasks {describe_exit(process.wait())}", value=name)


def _warn_of_shortage(name: str, request: Request, made: int, left_out: int, why: str) -> None:
    if left_out:
        log.warning("%s: %d tasks were left out: %s", name, left_out, why)
    if made < request.num_tasks:
        log.warning(
            "%s: only %d different questions for %s, not %d: %d draws in a row gave no new one",
            name, made, request.split, request.num_tasks, MAX_FUTILE_DRAWS,
        )  # fmt: skip


def main() -> None:
    with connect_to_parent() as end, end.makefile("rwb") as stream:

        def send(line: Line) -> None:
            stream.write(msgspec.json.encode(line) + b"\n")
            stream.flush()

        try:
            for line in made(msgspec.json.decode(stream.readline(), type=Request)):
                send(line)
        except BadInput as error:
            send(Refused(error.fact, error.key, error.value, error.fix))


def made(request: Request) -> Iterator[Made | Finished]:
    """Yield what the process sends to its parent: the tasks, then a summary."""
    questions: set[str] = set()
    faults: list[str] = []
    futile = 0
    for number, (task, fault) in enumerate(_draws(request), 1):
        futile += 1
        if fault:
            faults.append(fault)
        elif task["question"] not in questions and is_held_out(task["question"]) == (request.split == "eval"):
            futile = 0
            questions.add(task["question"])
            yield Made(task)
        if 2 * len(faults) >= number and number >= MIN_DRAWS_TO_REFUSE:
            share = f"on {len(faults)} of {number} tasks {faults[0]}"
            raise BadInput(f"cannot be trained on: {share}", value=f"reasoning-gym:{request.family}")
        if len(questions) == request.num_tasks or futile == MAX_FUTILE_DRAWS:
            break
    if not questions:
        fact = f"no question for the split {request.split!r}"
        raise BadInput(fact, value=f"reasoning-gym:{request.family}")
    yield Finished(len(faults), faults[0] if faults else "")


def is_held_out(question: str) -> bool:
    """Return whether a question is in `eval`."""
    return hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % EVAL_SHARE == 0


def _draws(request: Request) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield tasks without end, each with its fault, or ""."""
    family = Family(request.family, request.settings)
    seed = random.Random(f"reasoning-gym-{request.seed}").randrange(2**31)
    for first in itertools.count(0, DATASET_SIZE):
        dataset = family.made(seed + first, DATASET_SIZE)
        yield from (_draw(request, dataset, index) for index in range(DATASET_SIZE))


def _draw(request: Request, dataset: Any, index: int) -> tuple[dict[str, Any], str]:
    started = time.perf_counter()
    try:
        task = _made(dataset, index)
        quick = time.perf_counter() - started < QUICK_S
        if quick and msgspec.json.encode(_made(dataset, index)) != msgspec.json.encode(task):
            return {}, "it differs when it is made again"
    except Exception as error:
        return {}, f"making it raises {fault_of(error).text}"
    return task, _fault_of_gold(request, task)


def _made(dataset: Any, index: int) -> dict[str, Any]:
    random.seed(dataset.seed + index)  # some families use the global generators
    np.random.seed(dataset.seed + index)
    return as_task(dataset[index])


def _fault_of_gold(request: Request, task: dict[str, Any]) -> str:
    """Return the fault of a task whose gold answer does not score 1, or ""."""
    if task["answer"] is None:
        return "there is no gold answer to try its scorer with"
    try:
        earned = score(request.family, request.settings, task["answer"].strip(), task)
    except Exception as error:
        return f"the scorer raises {fault_of(error).text} on the gold answer {task['answer']!r}"
    return "" if earned == 1.0 else f"the gold answer {task['answer']!r} earns {earned:g}"
