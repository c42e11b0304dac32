"""An algorithm on the stage: its hooks called as the orchestrator calls them, and what it left behind.

Whatever its code raises becomes a `HookFailed` with the place in its own file.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import headrace
from headrace.algorithms.base import Algorithm, Host, RolloutView, Survivor
from headrace.environments.fault import fault_of, user_code_location
from headrace.errors import BadInput
from headrace.inference.client.reference import Reference
from headrace.rollout.routing import route_actions
from headrace.rollout.types import Rollout, Sample
from headrace.tools.check_algorithm.cases import Case

PACKAGE = Path(headrace.__file__).parent
LONGEST_HOOK = 60.0
"""Seconds."""
COMPONENTS = ("rl", "ce", "ref_kl")
Streams = list[dict[str, np.ndarray]]
"""Of each sample of a rollout."""


class Subject(msgspec.Struct, frozen=True):
    """What is tried: `make` constructs a fresh one, with this model in the role that it gives to another."""

    name: str
    make: Callable[[Reference], Algorithm]
    folders: tuple[str, ...] = ()
    """Where the code of its user lies: places there are named rather than ours."""


class HookFailed(Exception):
    """A hook of the algorithm raised. The message is complete."""

    def __init__(self, hook: str, case: str, error: BaseException, folders: Sequence[str]) -> None:
        frames = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
        place = user_code_location([frame for frame in frames if _is_in(frame[0], folders)] or frames, "")
        text = f"it took longer than {LONGEST_HOOK:g} s" if isinstance(error, _TooLong) else fault_of(error).text
        where = f" on {case!r}" if case else ""
        super().__init__(f"{hook}{where}: {text}" + (f", at {place}" if place else ""))


class _TooLong(Exception):
    """Nobody waits for ever."""


def _is_in(file: str, folders: Sequence[str]) -> bool:
    path = Path(file)
    own = (path.relative_to(folder) for folder in folders if path.is_relative_to(folder))
    return not path.is_relative_to(PACKAGE) and any("site-packages" not in inner.parts for inner in own)


class Played(msgspec.Struct):
    """A case, and what an algorithm made of it."""

    case: Case
    """As it was."""
    credited: Case
    """As it is now; the rollouts are in the same order."""
    by_group: list[Streams] = msgspec.field(default_factory=list)
    """What was written by the end of `score_group`."""
    by_algorithm: list[Streams] = msgspec.field(default_factory=list)
    """What was written by the algorithm in all, before tokens were sent to their loss."""
    drops: list[str] = msgspec.field(default_factory=list)
    """Why each rollout is not shipped; empty for one that is."""

    def shipped_samples(self) -> Iterator[tuple[Sample, dict[str, np.ndarray]]]:
        """With what the algorithm wrote on each."""
        for rollout, streams, drop in zip(self.credited.rollouts, self.by_algorithm, self.drops, strict=True):
            if not drop:
                yield from zip(rollout.samples, streams, strict=True)

    def members(self, places: Sequence[int]) -> Played:
        """What is left of it when these alone are."""
        by_group = [self.by_group[place] for place in places]
        return Played(self.case.members(places), self.credited.members(places), by_group)

    @property
    def written(self) -> list[Streams]:
        """In the end, for each rollout and each of its samples."""
        return [streams_of(rollout) for rollout in self.credited.rollouts]


class Session:
    """One instance, from `setup` to `close`."""

    def __init__(self, algorithm: Algorithm, folders: Sequence[str]) -> None:
        self.algorithm = algorithm
        self._folders = folders

    @classmethod
    @asynccontextmanager
    async def of(cls, subject: Subject, model: Reference, host: Host) -> AsyncIterator[Session]:
        """A fresh instance, set up, and closed in the end."""
        session = cls(await construct(subject, model), subject.folders)
        session.algorithm.host = host
        async with session._hook("setup"):
            await session.algorithm.setup()
        try:
            yield session
        finally:
            async with session._hook("close"):
                await session.algorithm.close()

    async def credit(self, case: Case) -> Played:
        """On arrival each rollout by itself, then the group."""
        played = Played(case, case.copied())
        views = [RolloutView(rollout, played.credited.task) for rollout in played.credited.rollouts]
        async with self._hook("score_rollout", case):
            for view in views:
                await self.algorithm.score_rollout(view)
        async with self._hook("score_group", case):
            await self.algorithm.score_group(views)
        played.by_group = played.written
        return played

    async def credit_at_once(self, cases: Sequence[Case]) -> list[Played]:
        """As in a run, whose groups of one environment do not wait for each other."""
        outcomes = await asyncio.gather(*map(self.credit, cases), return_exceptions=True)
        batch = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            batch.append(outcome)
        return batch

    async def ship(self, batch: Sequence[Played]) -> None:
        """The batch stage, and the way of the sampled tokens to their loss."""
        survivors = [[Survivor(rollout, p.credited.task) for rollout in p.credited.rollouts] for p in batch]
        async with self._hook("score_batch", batch[0].case if len(batch) == 1 else None):
            await self.algorithm.score_batch([survivor for group in survivors for survivor in group])
        for played, group in zip(batch, survivors, strict=True):
            played.by_algorithm = played.written
            played.drops = [survivor.drop_reason for survivor in group]
            for sample, _ in played.shipped_samples():
                if is_aligned(sample) and self.algorithm.action_loss_type in COMPONENTS:
                    route_actions(sample, self.algorithm.action_loss_type)

    async def state(self) -> Any:
        async with self._hook("state"):
            state = self.algorithm.state()
            return None if state is None else msgspec.json.decode(msgspec.json.encode(state))

    async def load_state(self, state: Any) -> None:
        async with self._hook("load_state"):
            self.algorithm.load_state(state)

    @asynccontextmanager
    async def _hook(self, name: str, case: Case | None = None) -> AsyncIterator[None]:
        async with _hook(name, case.name if case is not None else "", self._folders):
            yield


async def construct(subject: Subject, model: Reference) -> Algorithm:
    async with _hook("the constructor", "", subject.folders):
        return subject.make(model)


@asynccontextmanager
async def _hook(name: str, case: str, folders: Sequence[str]) -> AsyncIterator[None]:
    limit = asyncio.timeout(LONGEST_HOOK)
    try:
        async with limit:
            yield
    except BadInput:
        raise  # it explains itself
    except (Exception, SystemExit) as error:
        late = _TooLong().with_traceback(error.__traceback__) if limit.expired() else error
        raise HookFailed(name, case, late, folders) from error


def streams_of(rollout: Rollout) -> Streams:
    return [{name: np.array(values) for name, values in sample.streams.items()} for sample in rollout.samples]


def is_aligned(sample: Sample) -> bool:
    """Whether every stream has one value per token."""
    return all(np.shape(values) == sample.token_ids.shape for values in sample.streams.values())
