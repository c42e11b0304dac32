"""The drift of real weights: the embedded engine and the packed model, over HTTP and files."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.inference.embedded.engine import Engine
from headrace.inference.schema import Completion, SamplingParams, WeightVersionSpan
from headrace.orchestrator.drift import Drift
from headrace.rollout.batch import Batch, BatchSample
from headrace.rollout.types import NOT_SAMPLED, Sample
from headrace.rollout.version import Version
from headrace.trainer.model import PackedModel
from headrace.trainer.probe import write_probe
from headrace.transport.batches import ProbeStore
from tests.inference.plain_forward import run_all
from tests.inference.serving import client_of_engine

V0, V1 = Version(0, 0), Version(0, 1)
LONGEST = 64
Publish = Callable[[Any, Version], Path]
MakeModel = Callable[[int], Any]


@pytest.fixture
def probes(tmp_path: Path) -> ProbeStore:
    return ProbeStore(tmp_path / "probes")


def start(engine: Engine, temperature: float, count: int = 6) -> list[Any]:
    rng = random.Random(0)
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
    return [engine.submit([rng.randrange(97) for _ in range(5 + i)], params) for i in range(count)]


def completion_of(request: Any) -> Completion:
    result = request.future.result()
    spans = [WeightVersionSpan(str(version), start, end) for version, start, end in result.version_spans]
    return Completion(result.token_ids, result.logprobs, spans, result.finish_reason)


def sample_of(request: Any) -> Sample:
    prompt, completion = request.prompt_length, completion_of(request)
    return Sample(
        np.array(request.tokens),
        np.arange(len(request.tokens)) >= prompt,
        np.array([0.0] * prompt + completion.logprobs),
        np.concatenate([[NOT_SAMPLED] * prompt, completion.steps]),
        prompt,
        request.params.temperature,
    )


async def measure(engine: Engine, model_directory: Path, probes: ProbeStore, requests: list[Any]) -> dict[str, float]:
    """What is found out at the engine's version."""
    async with client_of_engine(engine, model_directory) as client:
        drift = Drift(client, probes, completions=100, max_model_len=LONGEST)
        drift.follow(engine.version)
        for request in requests:
            prompt = request.tokens[: request.prompt_length]
            drift.observe(prompt, completion_of(request), request.params.temperature)
        await drift.wait_for_requests(60.0)
        report = drift.end()
    assert report is not None
    assert report[0] == engine.version.step
    assert (report[1]["drift/discarded"], report[1]["drift/failed"]) == (0, 0)
    return report[1]


def probe(probes: ProbeStore, version: Version, model: PackedModel, requests: list[Any]) -> None:
    entries = [BatchSample(sample_of(request), "env", 0) for request in requests]
    write_probe(probes, version, Batch(version.step, 0, entries), model, tokens=4096, seq_len=LONGEST)


async def test_the_same_weights_agree_and_other_weights_show(
    make_model: MakeModel, model_directory: Path, publish: Publish, probes: ProbeStore
) -> None:
    engine = Engine(make_model(0), max_model_len=LONGEST)
    requests = start(engine, temperature=0.7)
    run_all(engine)
    trained = PackedModel(model_directory)
    probe(probes, V0, trained, requests)
    same = await measure(engine, model_directory, probes, requests)
    assert same["drift/engine/tokens"] == same["drift/decode/tokens"] == 6 * 24
    assert max(same["drift/engine"], same["drift/decode"]) < 1e-6
    assert max(same["drift/engine/abs"], same["drift/decode/abs"]) < 1e-5
    assert "drift/staleness" not in same  # version 0 sampled all of it

    changed = make_model(0)
    with torch.no_grad():
        changed.model.layers[0].self_attn.o_proj.weight.mul_(1.1)
    engine.update_weights(publish(changed, V1), V1)
    probe(probes, V1, trained, requests)  # a trainer that missed the update
    other = await measure(engine, model_directory, probes, requests)
    assert other["drift/engine"] > 1e-4
    assert other["drift/staleness"] == pytest.approx(other["drift/engine"], rel=0.5)
    assert other["drift/staleness/age"] == 1
    assert "drift/decode" not in other  # nothing was sampled since


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
async def test_kept_keys_and_values_show_and_recomputed_ones_do_not(
    kv_on_update: Any, make_model: MakeModel, model_directory: Path, publish: Publish, probes: ProbeStore
) -> None:
    engine = Engine(make_model(0), max_model_len=LONGEST, kv_on_update=kv_on_update)
    requests = start(engine, temperature=1.0)
    for _ in range(8):
        engine.step()
    engine.update_weights(publish(make_model(1), V1), V1)
    run_all(engine)
    values = await measure(engine, model_directory, probes, requests)
    assert values["drift/kept_kv/tokens"] == 6 * 16  # those after the update
    assert "drift/decode" not in values
    if kv_on_update == "keep":
        assert values["drift/kept_kv"] > 0.1
    else:
        assert values["drift/kept_kv"] < 1e-6
