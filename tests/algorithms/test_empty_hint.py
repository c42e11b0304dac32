"""A teacher with an empty hint is the student: the embedded engine, over HTTP, scores what it sampled."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from headrace.algorithms.base import Host, Survivor
from headrace.algorithms.opd import Opd
from headrace.inference.client.engine_client import EngineClient
from headrace.inference.embedded.engine import Engine
from headrace.inference.embedded.loading import load_model
from headrace.inference.schema import SamplingParams
from headrace.orchestrator.crediting import PolicyReference
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import Rollout, Task, Turn
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from tests.algorithms.teachers import opsd_of, rlcsd_of
from tests.inference.serving import client_of_engine

LONGEST = 256


@pytest_asyncio.fixture
async def client(tiny_model: Path) -> AsyncIterator[EngineClient]:
    engine = Engine(load_model(tiny_model, "float32"), max_model_len=LONGEST)
    async with client_of_engine(engine, tiny_model) as client:
        yield client


async def play(
    client: EngineClient, prompt: list[int], turns: int, temperature: float, said: str, seed: int | None
) -> Rollout:
    """Tokens that the engine sampled, with a few that it did not between two turns."""
    made: list[Turn] = []
    for _ in range(turns):
        sampling = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, seed=seed)
        done = await client.generate(prompt, sampling)
        made.append(Turn(np.array(prompt), done.token_ids, done.logprobs, done.steps, temperature))
        prompt = [*prompt, *done.token_ids, *range(60, 70)]
    messages = [{"role": "assistant", "content": said}]
    return Rollout(group_id="group-0", messages=messages, turns=made, samples=merge_turns(made))


async def episodes(client: EngineClient, task: Task, seed: int | None = None) -> list[Survivor]:
    """One and two turns, at three temperatures; the last is two samples."""
    first = [40, *range(70, 90)]
    rollouts = [
        await play(client, first, 1, 1.0, "one", seed),
        await play(client, first, 2, 1.0, "two", seed),
        await play(client, first, 2, 0.7, "three", seed),
    ]
    apart = await play(client, first, 1, 1.3, "four", seed)
    apart.samples += (await play(client, [41, *first], 1, 1.3, "four", seed)).samples
    return [Survivor(rollout, task) for rollout in (*rollouts, apart)]


async def ready(algorithm: Any, client: EngineClient, model: Path) -> Any:
    tokenizer = Tokenizer(model)
    renderer = make_renderer(model, tokenizer, "default")
    await algorithm.start(Host("env", PolicyReference(client), renderer, tokenizer, LONGEST))
    return algorithm


def furthest(batch: list[Survivor]) -> float:
    """The largest difference between the teacher and what the student had when it sampled."""
    samples = [sample for survivor in batch for sample in survivor.samples]
    return max(float(np.abs((s.streams["ref_logprobs"] - s.logprobs)[s.mask]).max()) for s in samples)


@pytest.mark.parametrize("seed", [None, 0])  # on a CPU the engine serves a seeded request row by row
async def test_a_teacher_with_an_empty_hint_reproduces_the_students_logprobs(
    client: EngineClient, tiny_model: Path, seed: int | None
):
    batch = await episodes(client, Task("env", {"demonstration": ""}), seed)
    assert [len(survivor.samples) for survivor in batch] == [1, 1, 1, 2]
    assert sum(int(sample.mask.sum()) for survivor in batch for sample in survivor.samples) == 12 * 7
    for algorithm in (Opd(PolicyReference(client)), opsd_of(template="{demonstration}")):
        await (await ready(algorithm, client, tiny_model)).score_batch(batch)
        assert furthest(batch) < 1e-5
        assert algorithm.tally.take() == {"prefills": 5, "failures": 0}


async def test_a_hint_that_says_something_changes_them(client: EngineClient, tiny_model: Path):
    batch = await episodes(client, Task("env", {"demonstration": "Look, this is how."}))
    await (await ready(opsd_of(), client, tiny_model)).score_batch(batch)
    assert furthest(batch) > 1e-3


async def test_empty_hints_are_no_contrast_and_leave_the_credit_as_it_was(client: EngineClient, tiny_model: Path):
    batch = await episodes(client, Task("env", {}))
    for survivor, reward in zip(batch, (1.0, 1.0, 0.0, 0.0), strict=True):
        survivor.rollout.reward = reward
        survivor.rollout.messages[0]["content"] = ""
    algorithm = await ready(rlcsd_of(template="{response}"), client, tiny_model)
    await algorithm.score_group(batch)
    before = [sample.streams["advantages"].tolist() for survivor in batch for sample in survivor.samples]
    await algorithm.score_batch(batch)
    assert [sample.streams["advantages"].tolist() for s in batch for sample in s.samples] == before
    tally = algorithm.tally.take()
    assert (tally["modulated_fraction"], tally["contrast_available"], tally["teacher_failed"]) == (0, 1, 0)


@pytest.mark.parametrize(("length", "reason"), [(LONGEST - 1, ""), (LONGEST, "no_reference")])
async def test_what_is_too_long_for_the_engine_costs_its_own_rollout_alone(
    client: EngineClient, tiny_model: Path, length: int, reason: str
):
    batch = await episodes(client, Task("env", {}))
    long = Turn([40] * (length - 1), [41], [-1.0], [0], 1.0)
    batch.append(Survivor(Rollout(turns=[long], samples=merge_turns([long])), Task("env", {})))
    await (await ready(Opd(PolicyReference(client)), client, tiny_model)).score_batch(batch)
    assert [survivor.drop_reason for survivor in batch] == ["", "", "", "", reason]
