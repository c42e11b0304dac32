"""A step's probe: which sequences, and what the model makes of them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.rollout.batch import Batch, BatchSample, encode_batch
from headrace.rollout.types import NOT_SAMPLED
from headrace.rollout.version import Version
from headrace.trainer.model import PackedModel
from headrace.trainer.probe import choose_samples, sampled_logprobs, write_probe
from headrace.transport.batches import TRAINER_LOGPROBS, ProbeStore
from tests.trainer.training_samples import ARCHITECTURES, make_sample, random_samples, write_random_model

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("models") / "qwen3", ARCHITECTURES["qwen3"])


@pytest.fixture(scope="module")
def model(directory: Path) -> PackedModel:
    return PackedModel(directory)


def entries(count: int, length: int = 10, prompt: int = 4) -> list[BatchSample]:
    return [BatchSample(make_sample(range(i, i + length), prompt), "env", i) for i in range(count)]


def test_sequences_fill_the_budget_and_the_last_is_cut_to_it():
    chosen = choose_samples(entries(20), step=3, tokens=36, seq_len=64)
    assert [len(entry.sample) for entry in chosen] == [10, 10, 10, 6]
    assert len({entry.rollout for entry in chosen}) == 4


def test_the_step_decides_which():
    rollouts = [[e.rollout for e in choose_samples(entries(50), step, tokens=50, seq_len=64)] for step in (1, 1, 2)]
    assert rollouts[0] == rollouts[1] != rollouts[2]


def test_a_cut_that_leaves_nothing_sampled_is_left_out():
    assert [len(entry.sample) for entry in choose_samples(entries(20), step=0, tokens=14, seq_len=64)] == [10]


def test_one_sequence_is_probed_however_long_it_is():
    (long,) = choose_samples(entries(3, length=60), step=0, tokens=8, seq_len=64)
    assert len(long.sample) == 60
    (cut,) = choose_samples(entries(3, length=60), step=0, tokens=8, seq_len=32)
    assert len(cut.sample) == 32


def test_tokens_that_were_not_sampled_are_not_probed():
    written = make_sample([1, 2, 3], 1)
    written.versions[:] = NOT_SAMPLED
    first_token_alone = make_sample([1, 2], 0)
    first_token_alone.mask[1], first_token_alone.versions[1] = False, NOT_SAMPLED
    samples = [written, first_token_alone, make_sample([1, 2, 3], 3)]
    assert choose_samples([BatchSample(s, "env", i) for i, s in enumerate(samples)], 1, tokens=100, seq_len=64) == []


def test_logprobs_are_those_of_the_plain_model_at_each_samples_temperature(model: PackedModel, directory: Path):
    plain = AutoModelForCausalLM.from_pretrained(directory)
    samples = random_samples(seed=5, count=8)
    for sample, found in zip(samples, sampled_logprobs(model, samples), strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            logits = plain(input_ids=ids[None]).logits[0, :-1] / sample.temperature
        expected = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0][sample.mask[1:]]
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=0)


def test_a_probe_holds_sampled_tokens_and_what_the_trainer_finds(model: PackedModel, tmp_path: Path):
    samples = random_samples(seed=6, count=4)
    store = ProbeStore(tmp_path)
    batch = Batch(9, 0, [BatchSample(sample, "env", index) for index, sample in enumerate(samples)])
    write_probe(store, Version(2, 9), batch, model, tokens=1000, seq_len=64)
    read = {tuple(sample.token_ids): sample for sample in store.read(Version(2, 9))}
    assert len(read) == 4
    for sample, expected in zip(samples, sampled_logprobs(model, samples), strict=True):
        probed = read[tuple(sample.token_ids)]
        np.testing.assert_array_equal(probed.mask, sample.mask)
        np.testing.assert_array_equal(probed.logprobs, sample.logprobs)
        assert list(probed.streams) == [TRAINER_LOGPROBS]
        np.testing.assert_allclose(probed.streams[TRAINER_LOGPROBS][probed.mask], expected, atol=1e-5)
        assert list(sample.streams) == ["advantages"]  # the batch is as it was


def test_a_batch_in_which_nothing_was_sampled_leaves_no_probe(model: PackedModel, tmp_path: Path):
    store = ProbeStore(tmp_path)
    batch = Batch(1, 0, [BatchSample(make_sample([1, 2, 3], 3), "env", 0)])
    write_probe(store, Version(0, 1), batch, model, tokens=100, seq_len=64)
    assert store.versions() == []


def test_probing_leaves_no_gradient_and_no_graph(model: PackedModel):
    sampled_logprobs(model, random_samples(seed=7, count=2))
    assert all(parameter.grad is None for parameter in model.named_parameters().values())
    assert model.module.training


@pytest.mark.full
def test_two_ranks_write_what_one_process_writes_and_share_the_parameters_again(
    model: PackedModel, directory: Path, tmp_path: Path
):
    entries = [BatchSample(sample, "env", index) for index, sample in enumerate(random_samples(seed=8, count=12))]
    path = tmp_path / "batch"
    path.write_bytes(encode_batch(batch := Batch(1, 0, entries)))
    one, two = (ProbeStore(tmp_path / name) for name in ("one", "two"))
    write_probe(one, Version(0, 1), batch, model, tokens=64, seq_len=32)
    program = Path(__file__).parent / "probing_rank.py"
    command = [sys.executable, *TORCHRUN, program, directory, path, two.directory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for ours, theirs in zip(one.read(Version(0, 1)), two.read(Version(0, 1)), strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_allclose(ours.streams[TRAINER_LOGPROBS], theirs.streams[TRAINER_LOGPROBS], atol=1e-5)
