"""A user's class that declares a `model_role` has a teacher, which scores and generates."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.algorithms.base import Algorithm, MakeContext, RolloutView, Survivor
from headrace.algorithms.custom import ImportedAlgoConfig
from headrace.inference.client.reference import LimitedReference, ReferenceFailed
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import load_model
from headrace.orchestrator.crediting import PolicyReference
from headrace.tools.check_algorithm.fixtures import TEACHER, algorithm_config, make_fixtures
from headrace.tools.check_algorithm.invariants import check_algorithm
from tests.algorithms.teachers import SEQ_LEN, Teacher, rollout_of, set_up, survivors
from tests.inference.serving import client_of_engine
from tests.refusals import refused

HERE = __name__


class Judged(Algorithm):
    """Asks its judge for a verdict of two tokens on each rollout."""

    model_role = "judge"

    async def setup(self) -> None:  # does not call the base class, as users' code may not
        self.verdicts: list[list[int]] = []

    async def score_group(self, group: Sequence[RolloutView]) -> None:
        for rollout in group:
            rollout.assign_advantages(rollout.reward)

    async def score_batch(self, batch: Sequence[Survivor]) -> None:
        await asyncio.gather(*map(self._ask, batch))

    async def _ask(self, survivor: Survivor) -> None:
        try:
            verdict = await self.teacher.generate(survivor.samples[0].token_ids, 2)
        except ReferenceFailed as failure:
            survivor.drop("no_verdict", str(failure))
        else:
            self.verdicts.append(verdict.token_ids)


class Alone(Algorithm):
    pass


def made(model: Teacher, **keys: Any) -> Algorithm:
    config = algorithm_config({"type": f"{HERE}:Judged", **keys}, "test")
    algorithm = config.make(MakeContext(SEQ_LEN, lambda _: model))
    assert isinstance(algorithm, Judged)
    return algorithm


@pytest.mark.parametrize(("teacher", "frozen"), [("policy", False), (TEACHER, True)])
async def test_a_class_with_a_role_gets_the_model_that_the_run_file_names(teacher: Any, frozen: bool):
    policy, other = Teacher(), Teacher()
    algorithm = await set_up(made(other, teacher=teacher, max_concurrent=3), policy)
    used = other if frozen else policy
    assert [model.checked is not None for model in (policy, other)] == [not frozen, frozen]
    await algorithm.score_batch(survivors([rollout_of([n, 6]) for n in range(20)]))
    assert algorithm.verdicts == [[7, 7]] * 20
    assert (len(used.asked), used.most_under_way) == (20, 3)
    await algorithm.stop()
    assert (other.closed, policy.closed) == (frozen, False)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"type": f"{HERE}:Judged"}, {"key": "teacher"}),
        ({"type": f"{HERE}:Alone", "teacher": "policy"}, {"key": "teacher"}),
    ],
)
def test_a_missing_or_superfluous_teacher_is_refused_before_the_run_begins(
    settings: dict[str, Any], fields: dict[str, str]
):
    config = ImportedAlgoConfig.model_validate(settings)
    for refuses in (config.check_imports, lambda: config.make(MakeContext(SEQ_LEN, lambda _: Teacher()))):
        with refused(**fields):
            refuses()


def test_check_algorithm_gives_such_a_class_a_model():
    report = asyncio.run(check_algorithm(algorithm_config({"type": f"{HERE}:Judged"}, "test"), make_fixtures()))
    kinds = {check.check: check.verdict.kind for check in report.checks}
    assert (report.passed, kinds["failing model"]) == (True, "holds")


async def test_the_policy_continues_tokens_as_its_engine_samples_them(tiny_model: Path):
    engine = Engine(load_model(tiny_model, "float32"), max_model_len=64)
    async with client_of_engine(engine, tiny_model) as client:
        policy = LimitedReference(PolicyReference(client), 4)
        first, second = [await policy.generate([40, 41, 42], 8, 0.7, seed=3) for _ in range(2)]
        assert first == second and first.finish_reason in ("stop", "length")
        stopped = await policy.generate([40, 41, 42], 8, 0.7, seed=3, stop_token_ids=first.token_ids[:1])
        assert (stopped.token_ids, stopped.finish_reason) == (first.token_ids[:1], "stop")
        ids = np.array([40, 41, 42, *first.token_ids], np.int32)  # as samples have them
        assert np.isfinite(await policy.score(ids, 0.7)).all()
        assert await policy.generate(ids[:3], 8, 0.7, seed=3, stop_token_ids=ids[3:4]) == stopped
