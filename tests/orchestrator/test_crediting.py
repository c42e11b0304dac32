"""The algorithms of a run, and what the orchestrator lends to each."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from headrace.algorithms.base import Algorithm
from headrace.config.orchestrator import OrchestratorConfig
from headrace.errors import BadInput
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.reference import ReferenceFailed
from headrace.inference.schema import Health, Scores
from headrace.orchestrator.crediting import PastPolicy, PolicyReference, set_up_algorithms
from headrace.runfile.reading import validate
from headrace.transport.endpoint import PAST_SERVER
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RunDir
from tests.algorithms.teachers import MODEL, Teacher
from tests.orchestrator.stand_ins import StandInEngine, StandInTrainer
from tests.refusals import refused


class Idle(Algorithm):
    """Assigns no credit."""


@pytest.mark.parametrize(("inherited", "expected"), [({}, 1.0), ({"temperature": 0.8}, 0.8)])
async def test_an_algorithm_knows_what_its_environment_is_sampled_at(inherited: dict[str, float], expected: float):
    envs = [{"id": "a"}, {"id": "b", "sampling": {"temperature": 0.7}}]
    tree = {
        "seq_len": 64,
        "algo": "tests.orchestrator.test_crediting:Idle",
        "train": {"sampling": inherited, "env": envs},
    }
    config, _ = validate(OrchestratorConfig, tree, "run.toml")
    journal = Journal(Path(":memory:"))
    async with AsyncExitStack() as stack:
        algorithms = await set_up_algorithms(config, Teacher(), MODEL.renderer, MODEL.tokenizer, journal, stack)
        assert {name: algorithm.host.temperature for name, algorithm in algorithms.items()} == {"a": expected, "b": 0.7}
    journal.close()


@pytest.mark.parametrize(
    ("engine", "temperatures", "is_refused"),
    [("vllm", [1.0, 0.7], True), ("vllm", [1.0], False), ("vllm", [], False), ("embedded", [0.7], False)],
)
async def test_a_policy_on_vllm_is_not_asked_for_scores_that_it_does_not_give(
    engine: str, temperatures: list[float], is_refused: bool
):
    policy = PolicyReference(EngineClient([]))
    for temperature in temperatures:
        await policy.check(MODEL.tokenizer, 64, temperature)
    engines = [Health("ok", "0-0", "m", 0, 0, False, 8, 64, 300, engine=name) for name in ("embedded", engine)]
    if is_refused:
        with refused(BadInput, key="orchestrator.train.sampling.temperature", value=0.7):
            policy.check_engines(engines)
    else:
        policy.check_engines(engines)


async def test_the_past_policy_scores_a_batch_with_its_version_also_after_its_server_was_restarted(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    run = RunDir(tmp_path)
    run.create_directories()
    trainer = StandInTrainer(run)
    for step in range(5):
        trainer.publish(step)
    policy, past = StandInEngine(tiny_model, run), StandInEngine(tiny_model, run, name=PAST_SERVER)
    past.score_token = lambda version, token, temperature: -1.0 - version.step
    client = EngineClient(run.endpoints, past=True, retry_for=10)
    async with policy, past, AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        reference = PastPolicy(client, run.weights, every=2)
        for step, expected in ((1, 0), (3, 2), (4, 2), (5, 4), (3, 2)):  # a journal may go back
            reference.use_batch(step)
            scores = await asyncio.gather(*[reference.score([1, 2, 3], 1.0) for _ in range(8)])
            assert all(list(score) == [0.0, -1.0 - expected, -1.0 - expected] for score in scores)
        await past.die()
        await past.listen()
        assert list(await reference.score([1, 2, 3], 1.0)) == [0.0, -3.0, -3.0]
        assert policy.version.step == 0 == policy.answered
        monkeypatch.setattr(client, "score", AsyncMock(return_value=Scores([0.0, -1.0, -1.0], None)))
        with pytest.raises(ReferenceFailed):  # and not for ever
            await reference.score([1, 2, 3], 1.0)
        reference.use_batch(9)
        with refused(BadInput, file=run.weights.directory):
            await reference.score([1, 2, 3], 1.0)
