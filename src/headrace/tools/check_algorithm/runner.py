"""Run an algorithm on test cases: call its hooks as the orchestrator does and record what they write.

Any exception of a hook becomes a `HookFailed` that names the line in the user's own file.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

import headrace
from headrace import imports
from headrace.algorithms.base import Algorithm, Host, MakeContext, RolloutView, Survivor
from headrace.algorithms.custom import CustomAlgoConfig
from headrace.algorithms.kl import make_algorithm
from headrace.config.algorithms import AlgorithmConfig, Promises
from headrace.environments.fault import fault_of, user_code_location
from headrace.errors import BadInput
from headrace.inference.client.reference import Reference
from headrace.rollout.routing import route_actions
from headrace.rollout.types import Sample
from headrace.tools.check_algorithm.fixtures import SEQ_LEN, Case, FakeModel, Fixtures, make_cases

PACKAGE = Path(headrace.__file__).parent
HOOK_TIMEOUT_S = 60.0
COMPONENTS = ("rl", "ce", "ref_kl")
Streams = list[dict[str, np.ndarray]]
"""The streams of each sample of a rollout."""


class AlgorithmFactory(msgspec.Struct, frozen=True):
    name: str
    make: Callable[[Reference], Algorithm]
    """Construct a new instance that uses this model as its teacher."""
    folders: tuple[str, ...] = ()
    """Folders of the user's code: error locations name files in them rather than in headrace."""


class HookFailed(Exception):
    """A hook of the algorithm raised or timed out; the message has the hook, the case, the error and its location."""

    def __init__(self, hook: str, case: str, error: BaseException, folders: Sequence[str], *, timed_out: bool) -> None:
        frames = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_tb(error.__traceback__))]
        location = user_code_location([frame for frame in frames if _is_user_code(frame[0], folders)] or frames, "")
        text = f"took longer than {HOOK_TIMEOUT_S:g} s" if timed_out else fault_of(error).text
        where = f" on {case!r}" if case else ""
        super().__init__(f"{hook}{where}: {text}" + (f", at {location}" if location else ""))


def _is_user_code(file: str, folders: Sequence[str]) -> bool:
    path = Path(file)
    inner = (path.relative_to(folder) for folder in folders if path.is_relative_to(folder))
    return not path.is_relative_to(PACKAGE) and any("site-packages" not in part.parts for part in inner)


class CaseResult(msgspec.Struct):
    """A case and what an algorithm wrote on it."""

    case: Case
    """The case before the algorithm ran."""
    credited: Case
    """A copy of the case that the algorithm has modified; rollouts are in the same order."""
    after_group: list[Streams] = msgspec.field(default_factory=list)
    """Streams by rollout at the end of `score_group`."""
    after_batch: list[Streams] = msgspec.field(default_factory=list)
    """Streams by rollout at the end of `score_batch`, before tokens are routed to their loss."""
    drops: list[str] = msgspec.field(default_factory=list)
    """Reason why each rollout is not shipped; empty for a rollout that is shipped."""

    def shipped_samples(self) -> Iterator[tuple[Sample, dict[str, np.ndarray]]]:
        """Yield each shipped sample with the streams that the algorithm wrote on it."""
        for rollout, streams, drop in zip(self.credited.rollouts, self.after_batch, self.drops, strict=True):
            if not drop:
                yield from zip(rollout.samples, streams, strict=True)

    def members(self, indices: Sequence[int]) -> CaseResult:
        """Return the result with only these rollouts, as after a filter."""
        after_group = [self.after_group[index] for index in indices]
        return CaseResult(self.case.members(indices), self.credited.members(indices), after_group)

    @property
    def streams(self) -> list[Streams]:
        """A copy of the current streams of each rollout."""
        return [
            [{name: np.array(values) for name, values in sample.streams.items()} for sample in rollout.samples]
            for rollout in self.credited.rollouts
        ]


class Session:
    """One algorithm instance, from `setup` to `close`."""

    def __init__(self, algorithm: Algorithm, folders: Sequence[str]) -> None:
        self.algorithm = algorithm
        self._folders = folders

    @classmethod
    @asynccontextmanager
    async def open(cls, factory: AlgorithmFactory, model: Reference, host: Host) -> AsyncIterator[Session]:
        session = cls(await construct(factory, model), factory.folders)
        async with session._hook("setup"):
            await session.algorithm.start(host)
        try:
            yield session
        finally:
            async with session._hook("close"):
                await session.algorithm.stop()

    async def credit(self, case: Case) -> CaseResult:
        """Call `score_rollout` for each rollout, then `score_group`."""
        result = CaseResult(case, case.copied())
        views = [RolloutView(rollout, result.credited.task) for rollout in result.credited.rollouts]
        async with self._hook("score_rollout", case):
            for view in views:
                await self.algorithm.credit_rollout(view)
        async with self._hook("score_group", case):
            await self.algorithm.credit_group(views)
        result.after_group = result.streams
        return result

    async def credit_concurrently(self, cases: Sequence[Case]) -> list[CaseResult]:
        """Credit all cases at the same time, as a run does with the groups of one environment."""
        outcomes = await asyncio.gather(*map(self.credit, cases), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return cast(list[CaseResult], outcomes)

    async def ship(self, batch: Sequence[CaseResult]) -> None:
        """Call `score_batch`, then route the sampled tokens of the rollouts that were not dropped to their loss."""
        survivors = [[Survivor(rollout, r.credited.task) for rollout in r.credited.rollouts] for r in batch]
        async with self._hook("score_batch", batch[0].case if len(batch) == 1 else None):
            await self.algorithm.credit_batch([survivor for group in survivors for survivor in group])
        for result, group in zip(batch, survivors, strict=True):
            result.after_batch = result.streams
            result.drops = [survivor.drop_reason for survivor in group]
            for sample, _ in result.shipped_samples():
                if is_aligned(sample) and self.algorithm.action_loss_type in COMPONENTS:
                    route_actions(sample, self.algorithm.action_loss_type)

    async def state(self) -> Any:
        """Return the algorithm's state after a round trip through JSON."""
        async with self._hook("state"):
            state = self.algorithm.state()
            return None if state is None else msgspec.json.decode(msgspec.json.encode(state))

    async def load_state(self, state: Any) -> None:
        async with self._hook("load_state"):
            self.algorithm.load_state(state)

    def _hook(self, name: str, case: Case | None = None) -> AbstractAsyncContextManager[None]:
        return _guard_hook(name, case.name if case is not None else "", self._folders)


async def construct(factory: AlgorithmFactory, model: Reference) -> Algorithm:
    async with _guard_hook("the constructor", "", factory.folders):
        return factory.make(model)


@asynccontextmanager
async def _guard_hook(name: str, case: str, folders: Sequence[str]) -> AsyncIterator[None]:
    """Limit a hook to `HOOK_TIMEOUT_S` and turn its exceptions, except `BadInput`, into `HookFailed`."""
    limit = asyncio.timeout(HOOK_TIMEOUT_S)
    try:
        async with limit:
            yield
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        raise HookFailed(name, case, error, folders, timed_out=limit.expired()) from error


def is_aligned(sample: Sample) -> bool:
    """Return whether every stream has one value per token."""
    return all(np.shape(values) == sample.token_ids.shape for values in sample.streams.values())


class AlgorithmRunner(msgspec.Struct):
    """An algorithm, its cases, and the results of each case alone and of all cases in one batch."""

    factory: AlgorithmFactory
    kind: type[Algorithm]
    promises: Promises
    fixtures: Fixtures
    cases: list[Case]
    alone: dict[str, CaseResult | HookFailed] = msgspec.field(default_factory=dict)
    """By case name: the result of the case by itself."""
    together: list[CaseResult] | HookFailed = msgspec.field(default_factory=list)
    """The results of all sound cases in one batch."""
    repeated: list[CaseResult] | HookFailed = msgspec.field(default_factory=list)
    """The results of the same batch from another instance."""
    model_requests: int = 0
    """Requests that the algorithm sent to another model."""

    @classmethod
    async def create(cls, config: AlgorithmConfig, fixtures: Fixtures) -> AlgorithmRunner:
        """Construct the algorithm and run all cases; raises `BadInput`, or `HookFailed` from the constructor."""
        factory = make_factory(config)
        algorithm = await construct(factory, FakeModel())
        cases = make_cases(fixtures, config.example_info())
        runner = cls(factory, type(algorithm), config.promises(algorithm), fixtures, cases)
        model = FakeModel()
        for case in runner.cases:
            try:
                (runner.alone[case.name],) = await runner.run([case], model)
            except HookFailed as failure:
                runner.alone[case.name] = failure
        runner.model_requests = model.requests
        runner.together = await runner._run_sound_cases()
        runner.repeated = await runner._run_sound_cases()
        return runner

    async def _run_sound_cases(self) -> list[CaseResult] | HookFailed:
        try:
            return await self.run(self.sound_cases)
        except HookFailed as failure:
            return failure

    async def run(self, cases: Sequence[Case], model: Reference | None = None) -> list[CaseResult]:
        """Credit the cases one by one with a new instance and ship them in one batch."""
        async with self.session(model) as session:
            batch = [await session.credit(case) for case in cases]
            if batch:
                await session.ship(batch)
        return batch

    def session(self, model: Reference | None = None) -> AbstractAsyncContextManager[Session]:
        """Open a session of a new instance, with `model` as the policy and as its teacher."""
        model = model or FakeModel()
        return Session.open(self.factory, model, self.fixtures.host(model))

    @property
    def sound_cases(self) -> list[Case]:
        """The cases in which no hook fails when they run alone."""
        return [case for case in self.cases if isinstance(self.alone[case.name], CaseResult)]

    @property
    def plain_cases(self) -> list[Case]:
        return [case for case in self.sound_cases if case.plain]

    @property
    def failures(self) -> list[HookFailed]:
        outcomes = [*self.alone.values(), self.together]
        return [outcome for outcome in outcomes if isinstance(outcome, HookFailed)]

    def results(self) -> Iterator[CaseResult]:
        """Yield the results of all cases that succeeded, alone and together."""
        yield from (outcome for outcome in self.alone.values() if isinstance(outcome, CaseResult))
        if not isinstance(self.together, HookFailed):
            yield from self.together

    def result_alone(self, case: Case) -> CaseResult:
        """Return the result of a sound case by itself."""
        outcome = self.alone[case.name]
        assert isinstance(outcome, CaseResult), "called for a sound case"
        return outcome


def make_factory(config: AlgorithmConfig) -> AlgorithmFactory:
    def make(model: Reference) -> Algorithm:
        algorithm = make_algorithm(config, MakeContext(SEQ_LEN, lambda _: model))
        if algorithm.kl is not None and algorithm.kl.in_reward:  # credit is the same function of what it leaves
            algorithm.kl = None
        return algorithm

    folders = []
    for import_path in dict.fromkeys(_import_paths(config.model_dump())):
        imports.load(import_path, "algorithm")
        file = sys.modules[import_path.partition(":")[0]].__file__
        folders.append(str(Path(file).parent) if file else "")
    name = config.import_path if isinstance(config, CustomAlgoConfig) else config.type
    return AlgorithmFactory(name, make, tuple(folders))


def _import_paths(settings: Any) -> Iterator[str]:
    """Yield the import paths of all user code in the settings."""
    if isinstance(settings, list):
        for entry in settings:
            yield from _import_paths(entry)
    elif isinstance(settings, dict):
        for key, value in settings.items():
            if key == "import_path" or (key == "type" and ":" in value):
                yield value
            elif key != "kwargs":
                yield from _import_paths(value)
