"""The tasks of a reasoning-gym family, made by a process of their own.

Several families draw from sets of texts, whose order differs from one process to the next, or from Python's own
generator: here both are always the same, so that a run that is resumed finds its tasks again. What a family prints,
imports, seeds or never comes back from stays in that process, too.

A question belongs to evaluation or to training by a checksum of its text, so that no question is in both, whatever the
seeds and settings. A family's scorer is not trusted: a task whose own answer it does not pay in full is left out, and a
family where most are is refused.
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
"""One question in so many belongs to evaluation. Not fewer: some families take a second for a question."""
CHUNK = 500
"""Entries of one dataset: what some families make all at once, whatever is asked of them."""
PATIENCE = 200
"""Draws in a row without a new question before there seem to be no more."""
TRIAL = 16
"""Draws after which a family of which half cannot be used is refused."""
QUICK = 0.02
"""Seconds: a task that takes less is made twice, and left out if it is another then, as where code looks at a clock."""
STUCK = 300.0
"""Seconds without a new task before there seems to be no end."""
PROGRESS = 10.0
"""Seconds before the first word about how far it is; the next comes after twice as many."""


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
    """About the first of those."""


Told = Made | Refused | Finished


def tasks_of_family(request: Request) -> list[dict[str, Any]]:
    """In a stable order, all questions different; fewer than asked for where there are no more."""
    with tempfile.TemporaryDirectory() as scratch:  # some families run code that writes files
        return _made_apart(request, scratch)


def _made_apart(request: Request, folder: str) -> list[dict[str, Any]]:
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
        return _gathered(request, ours, process)
    finally:
        ours.close()
        os.close(lifeline)
        process.kill()
        process.wait()


def _gathered(request: Request, ours: socket.socket, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    decoder: msgspec.json.Decoder[Told] = msgspec.json.Decoder(Told)
    name, started, silence = f"reasoning-gym:{request.family}", time.monotonic(), PROGRESS
    tasks: list[dict[str, Any]] = []
    ours.settimeout(STUCK)
    try:
        for line in ours.makefile("rb"):
            match decoder.decode(line):
                case Made(task):
                    tasks.append(task)
                case Refused(fact, key, value, fix):
                    raise BadInput(fact, key=key, value=value, fix=fix)
                case Finished(left_out, why):
                    _tell_shortage(name, request, len(tasks), left_out, why)
                    return tasks
            if (elapsed := time.monotonic() - started) > silence:
                silence = 2 * elapsed
                log.info("%s: %d of %d tasks made in %.0f s", name, len(tasks), request.num_tasks, elapsed)
    except TimeoutError as error:
        raise BadInput(
            f"{name} made {len(tasks)} tasks, and then none for {STUCK:g} s, with the settings {request.settings}",
            key="args.num_tasks",
            value=request.num_tasks,
            fix="Lower num_tasks, or choose easier settings.",
        ) from error
    raise BadInput(f"the process that makes the tasks {describe_exit(process.wait())}", value=name)


def _tell_shortage(name: str, request: Request, made: int, left_out: int, why: str) -> None:
    if left_out:
        log.warning("%s: %d tasks were left out: %s", name, left_out, why)
    if made < request.num_tasks:
        log.warning(
            "%s: only %d different questions for %s, not %d: %d draws in a row gave no new one",
            name, made, request.split, request.num_tasks, PATIENCE,
        )  # fmt: skip


def main() -> None:
    with connect_to_parent() as end, end.makefile("rwb") as stream:

        def tell(told: Told) -> None:
            stream.write(msgspec.json.encode(told) + b"\n")
            stream.flush()

        try:
            for told in made(msgspec.json.decode(stream.readline(), type=Request)):
                tell(told)
        except BadInput as error:
            tell(Refused(error.fact, error.key, error.value, error.fix))


def made(request: Request) -> Iterator[Made | Finished]:
    """What there is to tell the parent."""
    known: set[str] = set()
    faults: list[str] = []
    in_vain = 0
    for number, (task, fault) in enumerate(_draws(request), 1):
        in_vain += 1
        if fault:
            faults.append(fault)
        elif task["question"] not in known and is_held_out(task["question"]) == (request.split == "eval"):
            in_vain = 0
            known.add(task["question"])
            yield Made(task)
        if 2 * len(faults) >= number and number >= TRIAL:
            share = f"on {len(faults)} of {number} tasks {faults[0]}"
            raise BadInput(f"cannot be trained on: {share}", value=f"reasoning-gym:{request.family}")
        if len(known) == request.num_tasks or in_vain == PATIENCE:
            break
    if not known:
        fact = f"no question for the split {request.split!r}"
        raise BadInput(fact, value=f"reasoning-gym:{request.family}")
    yield Finished(len(faults), faults[0] if faults else "")


def is_held_out(question: str) -> bool:
    """Whether a question is one of evaluation."""
    return hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % EVAL_SHARE == 0


def _draws(request: Request) -> Iterator[tuple[dict[str, Any], str]]:
    """Endless tasks, each with what is wrong with it, if something is."""
    family = Family(request.family, request.settings)
    seed = random.Random(f"reasoning-gym-{request.seed}").randrange(2**31)
    for first in itertools.count(0, CHUNK):
        dataset = family.made(seed + first, CHUNK)
        yield from (_draw(request, dataset, index) for index in range(CHUNK))


def _draw(request: Request, dataset: Any, index: int) -> tuple[dict[str, Any], str]:
    started = time.perf_counter()
    try:
        task = _made(dataset, index)
        quick = time.perf_counter() - started < QUICK
        if quick and msgspec.json.encode(_made(dataset, index)) != msgspec.json.encode(task):
            return {}, "it is another one the second time"
    except Exception as error:
        return {}, f"making it raises {fault_of(error).text}"
    return task, _fault_of_gold(request, task)


def _made(dataset: Any, index: int) -> dict[str, Any]:
    random.seed(dataset.seed + index)  # some families do not keep to the generator that they were given
    np.random.seed(dataset.seed + index)
    return as_task(dataset[index])


def _fault_of_gold(request: Request, task: dict[str, Any]) -> str:
    """What is wrong with the task's own answer, by the family's own scorer."""
    if task["answer"] is None:
        return "there is no gold answer to try its scorer with"
    try:
        earned = score(request.family, request.settings, task["answer"].strip(), task)
    except Exception as error:
        return f"the scorer raises {fault_of(error).text} on the gold answer {task['answer']!r}"
    return "" if earned == 1.0 else f"the gold answer {task['answer']!r} earns {earned:g}"
