"""One algorithm and what was tried with it: every case alone, all of them in one batch, and more for who asks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from headrace import imports
from headrace.algorithms.base import Algorithm
from headrace.algorithms.custom import CustomAlgoConfig
from headrace.algorithms.declaration import Promises, declared, make_algorithm
from headrace.config.algorithms import AlgorithmConfig
from headrace.inference.client.reference import Reference
from headrace.tools.check_algorithm.cases import Case, make_cases
from headrace.tools.check_algorithm.playing import HookFailed, Played, Session, Subject, construct
from headrace.tools.check_algorithm.stage import SEQ_LEN, Stage, StandIn


class Trial:
    def __init__(
        self, subject: Subject, kind: type[Algorithm], promises: Promises, stage: Stage, cases: list[Case]
    ) -> None:
        self.subject = subject
        self.kind = kind
        self.promises = promises
        self.stage = stage
        self.cases = cases
        self.alone: dict[str, Played | HookFailed] = {}
        """Each case by itself."""
        self.together: list[Played] | HookFailed = []
        """All of them that are sound, in one batch."""
        self.again: list[Played] | HookFailed = []
        """The same by another instance."""
        self.asked = 0
        """How often another model was asked."""

    @classmethod
    async def of(cls, config: AlgorithmConfig, stage: Stage) -> Trial:
        """Raises `BadInput` for what is no algorithm, and `HookFailed` if it cannot be constructed."""
        subject = subject_of(config)
        algorithm = await construct(subject, StandIn())
        declaration = declared(config)
        cases = make_cases(stage, declaration.example_info())
        trial = cls(subject, type(algorithm), declaration.promises(algorithm), stage, cases)
        model = StandIn()
        for case in trial.cases:
            try:
                (trial.alone[case.name],) = await trial.play([case], model)
            except HookFailed as failure:
                trial.alone[case.name] = failure
        trial.asked = model.asked
        trial.together = await trial._batch()
        trial.again = await trial._batch()
        return trial

    async def _batch(self) -> list[Played] | HookFailed:
        try:
            return await self.play(self.sound_cases)
        except HookFailed as failure:
            return failure

    async def play(self, cases: Sequence[Case], model: Reference | None = None) -> list[Played]:
        """A fresh instance credits each of them and ships them in one batch."""
        async with self.session(model) as session:
            batch = [await session.credit(case) for case in cases]
            if batch:
                await session.ship(batch)
        return batch

    def session(self, model: Reference | None = None) -> AbstractAsyncContextManager[Session]:
        """A fresh instance, with this model as the policy and as whatever else it asks."""
        model = model or StandIn()
        return Session.of(self.subject, model, self.stage.host(model))

    @property
    def sound_cases(self) -> list[Case]:
        """Those that raise nothing by themselves: nothing else can be learned from the others."""
        return [case for case in self.cases if isinstance(self.alone[case.name], Played)]

    @property
    def plain_cases(self) -> list[Case]:
        return [case for case in self.sound_cases if case.plain]

    @property
    def failures(self) -> list[HookFailed]:
        outcomes = [*self.alone.values(), self.together]
        return [outcome for outcome in outcomes if isinstance(outcome, HookFailed)]

    def played(self) -> Iterator[Played]:
        """Everything that went through."""
        yield from (outcome for outcome in self.alone.values() if isinstance(outcome, Played))
        if not isinstance(self.together, HookFailed):
            yield from self.together

    def played_alone(self, case: Case) -> Played:
        outcome = self.alone[case.name]
        assert isinstance(outcome, Played), "it is asked for a sound case"
        return outcome


def subject_of(config: AlgorithmConfig) -> Subject:
    def make(model: Reference) -> Algorithm:
        return make_algorithm(config, seq_len=SEQ_LEN, connect=lambda _: model)

    own = list(dict.fromkeys(_import_paths(config.model_dump())))
    name = config.import_path if isinstance(config, CustomAlgoConfig) else config.type
    return Subject(name, make, tuple(_folder(path) for path in own))


def _import_paths(settings: Any) -> Iterator[str]:
    """All code of the user that the settings name."""
    if isinstance(settings, list):
        for entry in settings:
            yield from _import_paths(entry)
    elif isinstance(settings, dict):
        for key, value in settings.items():
            if key == "import_path" or (key == "type" and ":" in value):
                yield value
            elif key != "kwargs":
                yield from _import_paths(value)


def _folder(import_path: str) -> str:
    imports.load(import_path, "algorithm")
    file = sys.modules[import_path.partition(":")[0]].__file__
    return str(Path(file).parent) if file else ""
