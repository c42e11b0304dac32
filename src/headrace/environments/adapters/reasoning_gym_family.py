"""A reasoning-gym family: its settings, its scorer, and its tasks, which a separate process makes.

Several families draw from sets of texts, whose order differs between processes, or from Python's global random
generator: in that process both are fixed, so that a resumed run has the same tasks. What a family prints, imports or
seeds, and a call that never returns, also stay there. A task has the whole entry, so that scoring an answer does not
generate it again. Types that JSON does not have are encoded, because scorers distinguish a tuple from a list.

A question is in `eval` or in `train` by a checksum of its text, so that no question is in both, whatever the seeds and
settings. A family's scorer is not trusted: a task whose gold answer does not score 1 is left out, and a family with
mostly such tasks is refused. Left out: mixtures ("composite"), which a run has as several environments.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from collections.abc import Collection, Iterator
from datetime import date
from datetime import time as time_of_day
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from headrace.environments.adapters import import_library
from headrace.environments.child_process import ONE_THREAD, connect_to_child, connect_to_parent, describe_exit
from headrace.environments.fault import fault_of
from headrace.errors import BadInput, suggest_similar

log = logging.getLogger(__name__)

PROGRAM = "from headrace.environments.adapters.reasoning_gym_family import main; main()"
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
EXTRA = "reasoning-gym"
RESERVED_SETTINGS = {"seed": "seed", "size": "num_tasks"}
"""Settings of every family that the environment sets, and the arguments to use instead."""
TUPLE, DICT, SET, WHOLE = "(tuple)", "(dict)", "(set)", "(int)"
"""Keys of an object that encodes a type which JSON does not have."""
MAX_INT = 2**63 - 1
SCORE_TOLERANCE = 1e-6
"""How far a score may be outside of 0 to 1: some are sums of fractions."""


class Family:
    """A family by name, with some of its settings; `build_dataset(seed, size)` returns its entries."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        families = import_library("reasoning_gym", EXTRA).factory.DATASETS
        if name == "composite":
            fix = "Give each of its families its own environment."
            raise BadInput("a mixture of families", value=f"reasoning-gym:{name}", fix=fix)
        if name not in families:
            raise BadInput("unknown family", value=f"reasoning-gym:{name}", fix=_suggest_name(name, families))
        self.name = name
        self._dataset, self._config = families[name]
        defaults: dict[str, Any] = {}
        for field in dataclasses.fields(self._config):
            make = field.default_factory
            default = field.default if make is dataclasses.MISSING else make()
            defaults[field.name] = None if default is dataclasses.MISSING else default
        free = sorted(defaults.keys() - RESERVED_SETTINGS.keys())
        for setting, value in settings.items():
            if setting in RESERVED_SETTINGS:
                fact, fix = "not a setting to choose", f"Set {RESERVED_SETTINGS[setting]} instead."
                raise BadInput(fact, key=f"args.{setting}", value=value, fix=fix)
            if setting not in free:
                fact = f"unknown setting of reasoning-gym:{name}"
                raise BadInput(fact, key=f"args.{setting}", value=value, fix=_suggest_name(setting, free))
        self._settings = settings
        self._defaults = defaults

    def build_dataset(self, seed: int, size: int) -> Any:
        """Return a dataset of `size` entries; entry `i` of some families depends only on `seed + i`."""
        try:
            settings = {name: _convert_setting(value, self._defaults[name]) for name, value in self._settings.items()}
            config = self._config(**settings, seed=seed, size=size)
            if hasattr(config, "validate"):
                config.validate()
            return self._dataset(config)
        except Exception as error:
            fact = f"refused by reasoning-gym:{self.name}: {str(error) or type(error).__name__}"
            raise BadInput(fact, key="args", value=self._settings) from error


_scorers: dict[tuple[str, bytes], Any] = {}


def _load_scorer(family: str, settings: dict[str, Any], *answer_and_task: Any) -> Any:
    """Return the scorer of a family, cached by its settings."""
    key = family, msgspec.json.encode(settings, order="deterministic")
    if key not in _scorers:
        _scorers[key] = Family(family, settings).build_dataset(seed=0, size=1)
    return _scorers[key]


def score(family: str, settings: dict[str, Any], answer: str, task: dict[str, Any]) -> float:
    """Return the score of an answer by the family's scorer, from 0 to 1. Raises whatever the scorer raises."""
    scorer = _load_scorer(family, settings)
    entry = {**task, "metadata": from_json_values(task["metadata"])}
    with contextlib.redirect_stdout(None):  # some of them print
        value = scorer.score_answer(answer, entry)
    number = float(value)
    if not -SCORE_TOLERANCE <= number <= 1 + SCORE_TOLERANCE:
        raise ValueError(f"score = {value!r}: the scorer must return a number from 0 to 1")
    return min(1.0, max(0.0, number))


score.before_fork = _load_scorer  # type: ignore[attr-defined]  # importing the library takes seconds


def to_json_values(value: Any) -> Any:
    """Encode a value as JSON values. `from_json_values` decodes it: numpy types become plain, sets frozen."""
    match value:
        case None | bool():
            return value
        case np.generic() | np.ndarray():
            return to_json_values(value.tolist())
        case str():
            return str.__str__(value)
        case int():
            return int(value) if abs(value) <= MAX_INT else {WHOLE: str(int(value))}
        case float():
            return float(value)
        case list():
            return [to_json_values(entry) for entry in value]
        case tuple():
            return {TUPLE: [to_json_values(entry) for entry in value]}
        case set() | frozenset():
            return {SET: sorted((to_json_values(entry) for entry in value), key=msgspec.json.encode)}
        case dict() if all(type(key) is str and key not in _RESTORE for key in value):
            return {key: to_json_values(entry) for key, entry in value.items()}
        case dict():
            return {DICT: [[to_json_values(key), to_json_values(entry)] for key, entry in value.items()]}
    raise TypeError(f"its metadata has a {type(value).__name__}, which cannot be passed on")


def from_json_values(value: Any) -> Any:
    """Return the value that `to_json_values` encoded."""
    match value:
        case list():
            return [from_json_values(entry) for entry in value]
        case dict():
            if len(value) == 1 and (kind := next(iter(value))) in _RESTORE:
                return _RESTORE[kind](from_json_values(value[kind]))
            return {key: from_json_values(entry) for key, entry in value.items()}
    return value


_RESTORE = {TUPLE: tuple, DICT: dict, SET: frozenset, WHOLE: int}


def _convert_setting(value: Any, like: Any) -> Any:
    """Return a setting of a run file in the type of the family's default, such as a list as a tuple."""
    if isinstance(value, list) and isinstance(like, list | tuple):
        return type(like)(_convert_setting(entry, like[0] if like else None) for entry in value)
    if isinstance(value, dict) and dataclasses.is_dataclass(like) and not isinstance(like, type):
        return type(like)(**{name: _convert_setting(entry, getattr(like, name, None)) for name, entry in value.items()})
    if isinstance(like, Enum):
        return type(like)(value)
    if isinstance(value, str) and isinstance(like, date | time_of_day):
        return type(like).fromisoformat(value)
    return value


def _suggest_name(name: str, names: Collection[str]) -> str:
    """Return a hint with the closest name and all names."""
    return suggest_similar(name, names, f"Known: {', '.join(sorted(names)) or 'none'}.")


class Request(msgspec.Struct):
    """The tasks to generate: a family with its settings, the split, and how many."""

    family: str
    settings: dict[str, Any]
    split: str
    num_tasks: int
    seed: int

    @property
    def title(self) -> str:
        return f"reasoning-gym:{self.family}"


def tasks_of_family(request: Request) -> list[dict[str, Any]]:
    """Return the tasks in a stable order, all questions different; fewer than requested where there are no more."""
    with tempfile.TemporaryDirectory() as folder:  # some families run code that writes files
        with connect_to_child() as (ours, lifeline, descriptors):
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", PROGRAM, *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=folder,
                env={**os.environ, **ONE_THREAD, **SAME_ORDER},
                start_new_session=True,  # it is ended together with what it has started
            )
        try:
            ours.sendall(msgspec.json.encode(request) + b"\n")
            return _receive_tasks(request, ours, process)
        finally:
            ours.close()
            os.close(lifeline)
            process.kill()
            process.wait()


def _receive_tasks(request: Request, ours: socket.socket, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """Return the tasks that the process sends, and log its progress. Raises `BadInput` if it refuses or stalls."""
    started, next_report = time.monotonic(), FIRST_PROGRESS_S
    tasks: list[dict[str, Any]] = []
    ours.settimeout(STALL_TIMEOUT_S)
    try:
        for line in map(msgspec.json.decode, ours.makefile("rb")):
            match line:
                case {"task": task}:
                    tasks.append(task)
                case {"refused": [fact, key, value, fix]}:
                    raise BadInput(fact, key=key, value=value, fix=fix)
                case {"left_out": left_out, "why": why}:
                    if left_out:
                        log.warning("%s: %d tasks were left out: %s", request.title, left_out, why)
                    if (count := len(tasks)) < request.num_tasks:
                        words = "%s: only %d different questions for %s, not %d: %d draws in a row gave no new one"
                        sizes = request.num_tasks, MAX_FUTILE_DRAWS
                        log.warning(words, request.title, count, request.split, *sizes)
                    return tasks
            if (elapsed := time.monotonic() - started) > next_report:
                next_report = 2 * elapsed
                log.info("%s: %d of %d tasks made in %.0f s", request.title, len(tasks), request.num_tasks, elapsed)
    except TimeoutError as error:
        fact = f"{request.title} made {len(tasks)} tasks, then none for {STALL_TIMEOUT_S:g} s, with {request.settings}"
        key, fix = "args.num_tasks", "Lower num_tasks, or choose easier settings."
        raise BadInput(fact, key=key, value=request.num_tasks, fix=fix) from error
    raise BadInput(f"the process that makes the tasks {describe_exit(process.wait())}", value=request.title)


def main() -> None:
    """Make the tasks of the parent's request, and send them."""
    with connect_to_parent() as end, end.makefile("rwb") as stream:
        try:
            for line in generate_tasks(msgspec.json.decode(stream.readline(), type=Request)):
                stream.write(msgspec.json.encode(line) + b"\n")
                stream.flush()
        except BadInput as error:
            stream.write(msgspec.json.encode({"refused": [error.fact, error.key, error.value, error.fix]}) + b"\n")


def generate_tasks(request: Request) -> Iterator[dict[str, Any]]:
    """Yield each `task`, then the number of tasks that were `left_out`, and the problem of the first of those."""
    questions: set[str] = set()
    faults: list[str] = []
    futile = 0
    family = Family(request.family, request.settings)
    seed = random.Random(f"reasoning-gym-{request.seed}").randrange(2**31)
    datasets = (family.build_dataset(seed + first, DATASET_SIZE) for first in itertools.count(0, DATASET_SIZE))
    draws = (_draw(request, dataset, index) for dataset in datasets for index in range(DATASET_SIZE))
    for number, (task, fault) in enumerate(draws, 1):
        futile += 1
        if fault:
            faults.append(fault)
        elif task["question"] not in questions and is_held_out(task["question"]) == (request.split == "eval"):
            futile = 0
            questions.add(task["question"])
            yield {"task": task}
        if 2 * len(faults) >= number and number >= MIN_DRAWS_TO_REFUSE:
            share = f"on {len(faults)} of {number} tasks {faults[0]}"
            raise BadInput(f"cannot be trained on: {share}", value=request.title)
        if len(questions) == request.num_tasks or futile == MAX_FUTILE_DRAWS:
            break
    if not questions:
        raise BadInput(f"no question for the split {request.split!r}", value=request.title)
    yield {"left_out": len(faults), "why": faults[0] if faults else ""}


def is_held_out(question: str) -> bool:
    """Return whether a question is in `eval`."""
    return hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % EVAL_SHARE == 0


def _draw(request: Request, dataset: Any, index: int) -> tuple[dict[str, Any], str]:
    """Return a task, and its fault, or ""."""
    started = time.perf_counter()
    try:
        task = _make_task(dataset, index)
        quick = time.perf_counter() - started < QUICK_S
        if quick and msgspec.json.encode(_make_task(dataset, index)) != msgspec.json.encode(task):
            return {}, "it differs when it is made again"
    except Exception as error:
        return {}, f"making it raises {fault_of(error).text}"
    return task, _find_gold_fault(request, task)


def _make_task(dataset: Any, index: int) -> dict[str, Any]:
    """Return entry `index` of a dataset as a task, with both global random generators seeded."""
    random.seed(dataset.seed + index)  # some families use the global generators
    np.random.seed(dataset.seed + index)
    entry = dataset[index]
    answer = None if entry["answer"] is None else str(entry["answer"])
    return {"question": str(entry["question"]), "answer": answer, "metadata": to_json_values(entry["metadata"])}


def _find_gold_fault(request: Request, task: dict[str, Any]) -> str:
    """Return the fault of a task whose gold answer does not score 1, or ""."""
    if task["answer"] is None:
        return "there is no gold answer to try its scorer with"
    try:
        earned = score(request.family, request.settings, task["answer"].strip(), task)
    except Exception as error:
        return f"the scorer raises {fault_of(error).text} on the gold answer {task['answer']!r}"
    return "" if earned == 1.0 else f"the gold answer {task['answer']!r} earns {earned:g}"
