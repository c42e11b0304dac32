"""Real runs whose own past scores their samples, on a further server: as a teacher across a kill, and for rewards."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.rollout.types import Sample
from headrace.transport.rollout_files import RolloutFiles
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import finish, headrace, start, wait_until, write_run_file
from tests.end_to_end.test_kl import REPEATABLE, steps_of

TAUGHT = """
[orchestrator.algo]
type = "opsd"
template = "{demonstration}"
teacher = { every = 2 }

[[orchestrator.train.env]]
id = "tests.end_to_end.environments:EmptyHints"
name = "letters"
"""
ROUNDING = 1e-4
"""Of float32 logprobs by two implementations of a model with a few layers."""


def samples_of(run: RunDir, step: int) -> list[Sample]:
    return [sample for saved in RolloutFiles(run.rollouts).read(step) for sample in saved.rollout.samples]


def assert_equal_models(*runs: RunDir) -> None:
    one, other = (load_file(run.final_model / "model.safetensors") for run in runs)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name], err_msg=name)


def logprobs(model: Path, sample: Sample) -> np.ndarray:
    """Return those of the sampled tokens, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(sample.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        scores = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits[0, :-1].log_softmax(-1)
    return np.concatenate([[0.0], scores.gather(-1, ids[0, 1:, None])[:, 0].numpy()])[sample.mask]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_teacher_is_the_policy_after_the_last_step_that_every_divides_and_a_kill_changes_nothing(
    tmp_path: Path, tiny_model: Path
):
    overlay = tmp_path / "taught.toml"
    overlay.write_text(TAUGHT)
    whole, killed = runs = [RunDir(tmp_path / name) for name in ("whole", "killed")]
    for run in runs:
        keep = 100 if run is whole else 1
        file = write_run_file(tmp_path, tiny_model, run.root)
        command = ("rl", file, overlay, *REPEATABLE, "--trainer.keep_weights", keep)
        process = start(*command)
        if run is killed:
            wait_until(lambda run=run: 4 in steps_of(run), "four steps", timeout=300)
            os.kill(process.pid, signal.SIGKILL)
            finish(process)
            process = start(*command, "--resume")
        code, output = finish(process, timeout=400)
        assert code == 0, output
        assert headrace("audit", run.root)[0] == 0
    assert_equal_models(whole, killed)
    for step, teacher in {1: 0, 2: 0, 3: 2, 4: 2, 5: 4}.items():
        version = whole.weights.of_step(teacher)
        assert version is not None
        sample = samples_of(whole, step)[0]
        scores = sample.streams["ref_logprobs"][sample.mask]
        assert np.abs(scores - logprobs(whole.weights.path(version), sample)).max() < ROUNDING
        # The policy that sampled is that after the step before.
        assert (np.abs(scores - sample.logprobs[sample.mask]).max() < ROUNDING) == (teacher == step - 1)
        assert all(
            np.array_equal(one.streams["ref_logprobs"], other.streams["ref_logprobs"])
            for one, other in zip(samples_of(whole, step), samples_of(killed, step), strict=True)
        )


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_penalty_in_the_reward_of_an_adapter_measures_the_distance_to_the_base_model(
    tmp_path: Path, tiny_model: Path
):
    run, kl = RunDir(tmp_path / "run"), "--orchestrator.algo.kl."
    options = (f"{kl}coef", 0.1, f"{kl}place", "reward", f"{kl}estimator", "k1", "--trainer.lora.r", 4)
    file = write_run_file(tmp_path, tiny_model, run.root)
    code, output = headrace("rl", file, *REPEATABLE, "--trainer.optim.lr", 0.01, *options, timeout=400)
    assert code == 0, output
    for step in (1, 5):
        for saved in RolloutFiles(run.rollouts).read(step):
            (sample,) = saved.rollout.samples
            distance = (sample.logprobs[sample.mask] - logprobs(tiny_model, sample)).sum()
            assert saved.rollout.metrics["reference_kl"] == pytest.approx(distance, abs=len(sample) * ROUNDING)
            assert (abs(distance) < len(sample) * ROUNDING) == (step == 1)
