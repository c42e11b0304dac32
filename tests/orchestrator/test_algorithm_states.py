"""What an algorithm has learned, from one process of a run to the next, and to another algorithm."""

import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.algorithms.base import Algorithm
from headrace.config.orchestrator import OrchestratorConfig
from headrace.errors import BadInput
from headrace.orchestrator.crediting import set_up_algorithms
from headrace.runfile.reading import validate
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import AlgorithmState, Draw, Entries, Outcome, Totals
from tests.algorithms.teachers import MODEL, Teacher
from tests.refusals import refused

HERE = "tests.orchestrator.test_algorithm_states"


class Remembering(Algorithm):
    learned: Any = "nothing"

    def state(self):
        return self.learned

    def load_state(self, state):
        self.learned = state


class AlsoRemembering(Remembering):
    """Its state means something else."""


class Forgetful(Algorithm):
    def state(self):
        return 1


def journal_with(state: AlgorithmState) -> Journal:
    journal = Journal(Path(":memory:"))
    journal.commit(Entries([Draw(0, "a", "key", 0)], [Outcome(0)], Totals(), {"a": state}), shipped=1)
    return journal


async def set_up(algo: str, journal: Journal) -> Any:
    tree = {"seq_len": 64, "algo": algo, "train": {"env": [{"id": "a"}]}}
    config, _ = validate(OrchestratorConfig, tree, "run.toml")
    async with AsyncExitStack() as stack:
        algorithms = await set_up_algorithms(config, Teacher(), MODEL.renderer, MODEL.tokenizer, journal, stack)
    return algorithms["a"]


async def test_an_algorithm_goes_on_from_its_state(caplog: pytest.LogCaptureFixture):
    algorithm = await set_up(f"{HERE}:Remembering", journal_with(AlgorithmState(f"{HERE}:Remembering", b"[1, 2]")))
    assert algorithm.learned == [1, 2]
    assert caplog.records == []


@pytest.mark.parametrize("algo", ["grpo", f"{HERE}:AlsoRemembering"])
async def test_another_algorithm_starts_without_state_and_logs_it_once(algo: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        algorithm = await set_up(algo, journal_with(AlgorithmState(f"{HERE}:Remembering", b"[1, 2]")))
    assert getattr(algorithm, "learned", "nothing") == "nothing"
    [record] = caplog.records
    assert isinstance(record.args, tuple) and record.args[:2] == ("a", f"{HERE}:Remembering")


async def test_a_state_that_is_still_nothing_is_not_loaded():
    algorithm = await set_up(f"{HERE}:Remembering", journal_with(AlgorithmState(f"{HERE}:Remembering", b"null")))
    assert algorithm.learned == "nothing"


async def test_a_state_that_could_not_be_given_back_is_refused_at_the_start():
    with refused(BadInput, key="algo.type", value=f"{HERE}:Forgetful"):
        await set_up(f"{HERE}:Forgetful", Journal(Path(":memory:")))
