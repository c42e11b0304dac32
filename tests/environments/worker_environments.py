"""Environments that do in a worker process what environments do when they go wrong. `data["do"]` says what."""

# ruff: noqa: ASYNC220, ASYNC240 - blocking its event loop is what an environment does when it goes wrong

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.environments.base import ChatFailed, Context, Environment, EpisodeError
from headrace.rollout.types import Rollout, Sample, Task, Turn

NAME = f"{__name__}:Deeds"

ODD: dict[str, list[Any]] = {
    "rewards": [{"r": True}, {"r": np.bool_(True)}, {"r": np.float32(0.5)}, {"r": np.int64(2)}, {"r": float("nan")},
                {"r": "high"}, {5: 1.0}, {"\ud800": 1.0}, 1.0, None, {"r": 10**400}, {}],
    "metrics": [{"m": True}, {"m": np.float32(0.5)}, {"m": 2**70}, {"m": "text"}, {"\ud800": 1.0}, {5: 1.0}, None],
    "messages": [[{"content": "\ud800"}], [{"content": 2**70}], [{"content": object()}], ["text"], [{5: "x"}], None,
                 [{"content": np.arange(3)}]],
    "agent": [5, "\ud800"],
    "stop_reason": [5, "\ud800", None],
    "truncated": [np.bool_(True), "yes"],
    "trainable": [None],
    "turns": [["text"], None],
    "timings": [{"sandbox": "long"}],
    "error": ["text"],
}  # fmt: skip
"""What users' code puts into the fields of a rollout."""


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("says nothing")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("says nothing")


class Deeds(Environment):
    """Each episode does one deed; whatever survives it gets a rollout that names its process."""

    def tasks(self) -> list[dict[str, Any]]:
        return [{"do": "answer"}]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        rollouts = await getattr(self, task.data["do"])(context, **task.data.get("with", {}))
        return rollouts or [Rollout(metrics={"pid": os.getpid()})]

    async def nothing(self, context: Context) -> None:
        pass

    async def answer(self, context: Context, turns: int = 2) -> list[Rollout]:
        messages = [{"role": "user", "content": "0"}]
        replies = []
        for _ in range(turns):
            replies.append(await context.chat(messages))
            messages += [replies[-1].message, {"role": "user", "content": str(len(messages))}]
        turns = [reply.turn for reply in replies]
        return [Rollout(rewards={"length": float(len(messages))}, messages=messages, turns=turns, stop_reason="done")]

    async def ask_at_once(self, context: Context) -> list[Rollout]:
        replies = await asyncio.gather(*(context.chat([{"role": "user", "content": str(n)}]) for n in range(5)))
        return [Rollout(messages=[reply.message for reply in replies])]

    async def print_much(self, context: Context) -> None:
        print("noise " * 20_000)
        sys.stdout.flush()
        os.write(1, b"\x00\x01\x02\x03" * 100)

    async def spin_until(self, context: Context, started: str, path: str) -> None:
        Path(started).touch()
        while not os.path.exists(path):
            pass

    async def backtrack_for_ever(self, context: Context, lock: str) -> None:
        """Holds `lock` until the process ends, in C code that never lets another thread run."""
        descriptor = os.open(lock, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        print("locked", flush=True)
        re.fullmatch("(a|aa)+b", "a" * 100)

    async def sleep_for_ever(self, context: Context, started: str, cancelled: str) -> None:
        Path(started).touch()
        try:
            await asyncio.sleep(3600)
        finally:
            Path(cancelled).touch()

    async def start_process(self, context: Context, lock: str) -> None:
        """Leaves a process behind that holds `lock`."""
        descriptor = os.open(lock, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        subprocess.Popen(["sleep", "3600"], pass_fds=[descriptor])

    async def look_up(self, context: Context) -> None:
        {}["no such column"]

    async def mumble(self, context: Context) -> None:
        raise ValueError("a lone surrogate: \ud800")

    async def leave(self, context: Context) -> None:
        sys.exit("a checker that wants to end the program")

    async def explain(self, context: Context) -> None:
        raise EpisodeError("sandbox", "no sandbox is free")

    async def cancel_itself(self, context: Context) -> None:
        raise asyncio.CancelledError

    async def catch(self, context: Context) -> list[Rollout]:
        try:
            await context.chat([])
        except ChatFailed as error:
            return [Rollout(stop_reason=f"{error.kind} | {error}")]
        raise AssertionError("the chat should have failed")

    async def give_up_waiting(self, context: Context, path: str) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(context.chat([]), 0.2)
        while not os.path.exists(path):
            await asyncio.sleep(0.01)

    async def chat_afterwards(self, context: Context) -> None:
        self.forgotten = asyncio.create_task(self.ask_at_once(context))

    async def return_numpy(self, context: Context) -> list[Rollout]:
        sample = Sample([1], [True], [0.0], [0], 0, streams={"mine": np.arange(1)})
        return [Rollout(rewards={"mean": np.float32(0.5)}, metrics={"n": np.int64(3)}, samples=[sample])]

    async def return_text(self, context: Context) -> list[Rollout]:
        return [Rollout(samples=[Sample([1], [True], [0.0], [0], 0, obs_spans="none")])]  # type: ignore[arg-type]

    async def give_odd_reason(self, context: Context) -> None:
        raise EpisodeError(404, "not found")  # type: ignore[arg-type]

    async def give_unprintable_reason(self, context: Context) -> None:
        raise EpisodeError("half \ud800", "a reason")

    async def be_unspeakable(self, context: Context) -> None:
        raise Unspeakable

    async def give_reason_without_text(self, context: Context) -> None:
        error = EpisodeError("", "no text")
        error.reason = Mute()  # type: ignore[assignment]
        raise error

    async def catch_episode_error(self, context: Context) -> list[Rollout]:
        try:
            await context.chat([])
        except EpisodeError as error:
            return [Rollout(stop_reason=f"{type(error).__name__} {error.reason}: {error}")]
        raise AssertionError("the chat should have failed")

    async def return_with(self, context: Context, field: str, which: int) -> Any:
        """A rollout that is good but for one field, whose value is one of those in `ODD`."""
        rollout = Rollout(turns=[Turn([1, 2], [3], [-0.5], [0], 1.0)], rewards={"r": 1.0})
        setattr(rollout, field, ODD[field][which])
        return [rollout]

    async def return_instead(self, context: Context) -> Any:
        return Rollout()

    async def exit_at_once(self, context: Context) -> None:
        os._exit(3)

    async def read_nowhere(self, context: Context) -> None:
        ctypes.string_at(0)

    async def grow(self, context: Context) -> list[Rollout]:
        self.ballast = b"x" * (200 << 20)
        return [Rollout(metrics={"pid": os.getpid()})]


class Ranks(Deeds):
    """Judges the answers of a group side by side."""

    async def score_group(self, rollouts: Sequence[Rollout]) -> None:
        if any(len(rollout.turns) == 0 for rollout in rollouts):
            raise RuntimeError("nothing to judge")
        longest = max(len(rollout.turns[0].completion_ids) for rollout in rollouts)
        for rollout in rollouts:
            rollout.rewards = {"share": len(rollout.turns[0].completion_ids) / longest}
            rollout.metrics["judge"] = os.getpid()


class HereOnly(Deeds):
    """Loads in the process whose id it is given and, once that file is there, nowhere else."""

    def __init__(self, home: int, broken: str) -> None:
        if os.getpid() != home and os.path.exists(broken):
            raise RuntimeError("the data set is not mounted here")


class Slow(Deeds):
    """Takes for ever to load elsewhere."""

    def __init__(self, home: int) -> None:
        if os.getpid() != home:
            time.sleep(3600)


class HalfOpen(Deeds):
    """Elsewhere its start fails, or takes for ever, once it has opened something."""

    def __init__(self, home: int, opened: str, closed: str, fails: bool) -> None:
        self._home = home
        self._opened = Path(opened)
        self._closed = Path(closed)
        self._fails = fails

    async def start(self) -> None:
        if os.getpid() != self._home:
            self._opened.touch()
            if self._fails:
                raise RuntimeError("half open")
            await asyncio.sleep(3600)

    async def close(self) -> None:
        self._closed.touch()
