"""Two ranks do what one process does: gradients, parameters, metrics."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from headrace.rollout.batch import Batch, BatchSample, encode_batch
from headrace.rollout.types import ROUTES, Sample
from headrace.transport.run_dir import read_header
from tests.models.families import write_model
from tests.trainer.rank_program import LR, VARIANTS, main
from tests.trainer.training_samples import ARCHITECTURES, make_sample, write_random_model

PROGRAM = Path(__file__).parent / "rank_program.py"


def random_samples(count: int) -> list[Sample]:
    """Lengths that differ; every third sample has a second component, which may overlap with the first."""
    rng = np.random.default_rng(0)
    samples = []
    for index in range(count):
        tokens = rng.integers(0, 96, rng.integers(4, 30)).tolist()
        streams = {"advantages": rng.normal(size=len(tokens)).tolist()}
        if index % 3 == 1:
            streams["ce_weights"] = (0.1 * (rng.random(len(tokens)) < 0.5)).tolist()
        if index % 3 == 2:
            streams["k3_weights"] = [0.5] * len(tokens)
        samples.append(make_sample(tokens, 2, **streams))
    return samples


BATCHES = {
    "thirteen samples": random_samples(13),
    "one sample, so that a rank has none": random_samples(1),
    "a component that only one of the ranks has": random_samples(2),
    "a reference that only one of the ranks has": [
        make_sample([1, 2, 3, 4, 5], 2, ref_kl_weights=[0, 0, 1, 1, 1], ref_logprobs=[-0.5] * 5, rl_weights=[0.0] * 5),
        make_sample([7, 8, 9], 1, advantages=[1.0] * 3),
    ],
    "a penalty that only one of the ranks has to score": [
        make_sample([1, 2, 3, 4, 5], 2, advantages=[1.0] * 5, k3_weights=[2.0] * 5),
        make_sample([7, 8, 9], 1, advantages=[1.0] * 3, k2_weights=[1.0] * 3, kl_logprobs=[-4.0] * 3),
    ],
    "no member of anything": [make_sample([1, 2, 3, 4], 4, rl_weights=[0.0] * 4) for _ in range(3)],
}


class Outcome:
    def __init__(self, directory: Path, name: str) -> None:
        self.tensors = load_file(directory / f"{name}.safetensors")
        self.report: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())

    def named(self, prefix: str) -> list[str]:
        return [key for key in self.tensors if key.startswith(f"{prefix}.")]


LLAMA, LORA, LATENTS, EXPERTS, REPLAY = (
    pytest.param(name, marks=pytest.mark.full) for name in ("llama", "lora", "latents", "qwen3_moe", "router_replay")
)
NUM_EXPERTS = 3
"""Which two ranks do not share evenly."""


def with_latents(sample: Sample) -> Sample:
    rows = np.random.default_rng(len(sample)).normal(size=(len(sample), 32)) * sample.mask[:, None]
    return msgspec.structs.replace(sample, streams={**sample.streams, "latents": rows.astype(np.float16)})


def with_routes(sample: Sample) -> Sample:
    """Two of the experts in each of two layers, except for the last token."""
    left_out = np.random.default_rng(len(sample)).integers(0, NUM_EXPERTS, (len(sample), 2))
    routes = np.array([[1, 2], [0, 2], [0, 1]], np.uint8)[left_out].reshape(len(sample), -1)
    routes[-1] = 255
    return msgspec.structs.replace(sample, streams={**sample.streams, ROUTES: routes})


CHANGES = {"latents": with_latents, "router_replay": with_routes}
"""Of every other sample, by the option of the program."""


@pytest.fixture(
    scope="module",
    params=["qwen3", LLAMA, LORA, LATENTS, EXPERTS, REPLAY],
    ids=["tied embeddings", "untied embeddings", "an adapter", "latents", "three experts", "replayed experts"],
)
def directories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where one process, and where two ranks, have left their outcome for every batch."""
    root = tmp_path_factory.mktemp("ranks")
    options = [request.param] if request.param in ("lora", *CHANGES) else []
    if request.param in ("qwen3_moe", "router_replay"):
        model = write_model(root / "model", "qwen3_moe", num_experts=NUM_EXPERTS)
    else:
        model = write_random_model(root / "model", ARCHITECTURES["qwen3" if options else request.param])
    batches, one, two = (root / name for name in ("batches", "one", "two"))
    for directory in (batches, one, two):
        directory.mkdir()
    for name, samples in BATCHES.items():
        if (change := CHANGES.get(request.param)) is not None:
            samples = [change(sample) if number % 2 else sample for number, sample in enumerate(samples)]
        entries = [BatchSample(sample, f"env{index % 2}", index) for index, sample in enumerate(samples)]
        (batches / name).write_bytes(encode_batch(Batch(1, 0, entries, [], {})))
    main(model, batches, one, **{name: VARIANTS[name] for name in options})
    command = [sys.executable, PROGRAM, model, batches, two, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return one, two


@pytest.mark.parametrize("name", BATCHES)
def test_two_ranks_come_to_what_one_process_comes_to(name: str, directories: tuple[Path, Path]):
    one, two = (Outcome(directory, name) for directory in directories)
    assert one.tensors.keys() == two.tensors.keys()
    for key in one.named("before"):
        assert torch.equal(two.tensors[key], one.tensors[key]), key
    for key in one.named("gradient"):
        # A gradient is a sum over at most a few hundred tokens, each term off by about 1e-7 of the largest.
        difference = (two.tensors[key] - one.tensors[key]).abs().max()
        assert difference <= 1e-5 * one.tensors[key].abs().max(), key
    assert two.report["tokens"] == one.report["tokens"]
    assert two.report["norm"] == pytest.approx(one.report["norm"], rel=1e-5)
    assert two.report["metrics"].keys() == one.report["metrics"].keys()
    for key, value in one.report["metrics"].items():
        assert two.report["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", BATCHES)
def test_every_parameter_takes_the_first_step_of_adam_along_its_own_gradient(name: str, directories: tuple[Path, Path]):
    # Parameters are not compared between the two: where a gradient is near eps, Adam turns its rounding into a visible
    # step. Against its own gradient a step is exact but for its own rounding, whatever the size of the gradient.
    for outcome in (Outcome(directory, name) for directory in directories):
        clipping = min(1.0, 1.0 / (outcome.report["norm"] + 1e-6))
        for key in outcome.named("gradient"):
            gradient = outcome.tensors[key].double() * clipping
            before, after = (outcome.tensors[key.replace("gradient", when, 1)] for when in ("before", "after"))
            expected = before.double() - LR * gradient / (gradient.abs() + 1e-8)
            torch.testing.assert_close(after.double(), expected, atol=1e-5 * LR, rtol=1e-6, msg=key)


@pytest.mark.parametrize("name", BATCHES)
def test_two_ranks_export_the_tokens_that_one_process_exports(name: str, directories: tuple[Path, Path]):
    one, two = (pq.read_table(directory / f"{name}.tokens") for directory in directories)
    assert len(list((directories[1] / f"{name}.tokens").glob("*.parquet"))) == 2
    two = two.sort_by([("sample", "ascending"), ("position", "ascending")])
    assert two.schema.equals(one.schema)
    headers = [read_header(table.schema.metadata, name) for table in (one, two)]
    assert headers[1].counts == headers[0].counts
    assert headers[1].gradient_sum == pytest.approx(headers[0].gradient_sum, rel=1e-4)
    for column in one.column_names:
        expected, given = one[column], two[column]
        if pa.types.is_floating(expected.type):
            assert given.is_null() == expected.is_null(), column
            np.testing.assert_allclose(given.drop_null(), expected.drop_null(), rtol=1e-3, atol=1e-6, err_msg=column)
        else:
            assert given == expected, column
    assert pc.sum(two["share"]).as_py() in (None, pytest.approx(1, abs=1e-5))


def test_a_batch_without_members_runs_backward_and_leaves_every_gradient_at_zero(directories: tuple[Path, Path]):
    outcome = Outcome(directories[1], "no member of anything")
    gradients = [outcome.tensors[key] for key in outcome.named("gradient")]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)
