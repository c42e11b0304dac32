"""`headrace rl` on a file with data, rewards and an objective: real processes, a tiny model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from tests.end_to_end.runs import finish, headrace, start, wait_until

OWN = '''
import math
import time

from headrace.environments.hackable import TrainingSample


def numbers(count=10):
    for number in range(count):
        yield TrainingSample(f"Write {number}.", str(number), {"number": number})


def variety(prompts, completions, answers, infos, faults=False):
    """More for more different letters; with faults it fails on four of five samples, each in its own way."""
    kind = infos[0]["number"] % 5 if faults else 0
    if kind == 1:
        raise KeyError("no such entry")
    while kind == 2:
        time.sleep(0.01)
    if kind == 3:
        return "a lot"
    scores = [len(set(completion)) / 10 for completion in completions]
    return [math.nan, *scores[1:]] if kind == 4 else scores
'''


def write_run(directory: Path, model: Path, **changes: Any) -> Path:
    (directory / "own.py").write_text(OWN)
    tree = {
        "model": str(model),
        "data": {"class_path": "own:numbers"},
        "objective": {"kwargs": {"additional_rewards": ["own:variety"]}},
        "rewards": {"timeout": 0.5, "kwargs": {"gsm8k_correctness_reward": {"symbolic": False}}},
        "generation": {"num_generations": 4, "max_new_tokens": 8, "max_prompt_tokens": 56},
        "trainer": {"learning_rate": 1e-3, "max_steps": 2, "batch_size": 16},
        "storage": {"cache_dir": str(directory / "store")},
        **changes,
    }
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def steps_of(run: Path, key: str) -> dict[int, float]:
    """What every step reported under a key."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines() if (run / "metrics.jsonl").exists() else []
    records = [msgspec.json.decode(line) for line in lines]
    return {record["step"]: record[key] for record in records if key in record}


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_reward_that_fails_in_every_way_is_counted_and_the_run_goes_on(tmp_path: Path, tiny_model: Path):
    kwargs = {"own:variety": {"faults": True}, "gsm8k_correctness_reward": {"symbolic": False}}
    orchestrator = {"train": {"curriculum": {"sampler": "in_order"}}}
    rewards = {"timeout": 0.5, "kwargs": kwargs}
    file = write_run(tmp_path, tiny_model, rewards=rewards, orchestrator=orchestrator)
    code, output = headrace("rl", file)
    assert code == 0, output
    run = tmp_path / "store" / "artifacts" / "runs" / "run"
    code, output = headrace("summary", run, "--json")
    (report,) = msgspec.json.decode(output)["environments"]
    assert report["rollouts_trained"] > 0
    assert {"reward_failed", "reward_timeout", "reward_no_number"} <= set(report["dropped"])
    assert "'own:variety'" in report["errors"]["reward_failed"]
    assert "KeyError: 'no such entry'" in report["errors"]["reward_failed"]
    assert "'own:variety'" in report["errors"]["reward_timeout"]
    assert "0.5 s" in report["errors"]["reward_timeout"]
    assert report["errors"]["reward_no_number"].startswith("reward 'own:variety' gave ")
    for reason, message in report["errors"].items():
        assert f"{reason}: {message}" in output
    assert steps_of(run, "metrics/numbers/own:variety").keys() == {1, 2}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_stage_that_was_reached_is_found_again_after_a_kill(tmp_path: Path, tiny_model: Path):
    stages = {"stage2_start_epoch": 1.2, "stage2_length_penalty_lambda": 0.75, "additional_rewards": ["own:variety"]}
    file = write_run(
        tmp_path,
        tiny_model,
        objective={"kwargs": {**stages, "reward_mode": "weighted_length_penalty"}},
        trainer={"learning_rate": 1e-4, "max_steps": 7, "batch_size": 16, "save_steps": 1},
        orchestrator={"max_async_level": 0},
    )
    run = tmp_path / "store" / "artifacts" / "runs" / "run"
    killed = start("rl", file)
    wait_until(lambda: 5 in steps_of(run, "metrics/numbers/stage"), "five steps")
    os.kill(killed.pid, signal.SIGKILL)
    finish(killed)
    code, output = headrace("rl", file, "--resume")
    assert code == 0, output
    # Step n is sampled by version n - 1, which has seen 0.4 (n - 1) of 10 samples' epochs: 1.2 from step 4 on.
    expected = {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2, 7: 2}
    assert steps_of(run, "metrics/numbers/stage") == expected
    lambdas = steps_of(run, "metrics/numbers/length_penalty_lambda")
    assert lambdas == {step: 0.75 if stage == 2 else 0.5 for step, stage in expected.items()}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_killed_run_that_thinks_in_latent_space_comes_to_the_model_of_an_uninterrupted_one(
    tmp_path: Path, tiny_model: Path
):
    models = {}
    for name, kills in (("whole", False), ("killed", True)):
        directory = tmp_path / name
        directory.mkdir()
        file = write_run(
            directory,
            tiny_model,
            objective={"name": "latent_neuralese", "kwargs": {"additional_rewards": ["own:variety"]}},
            trainer={"learning_rate": 1e-3, "max_steps": 4, "batch_size": 16, "save_steps": 1},
        )
        run = directory / "store" / "artifacts" / "runs" / "run"
        process = start("rl", file)
        if kills:
            wait_until(lambda run=run: 2 in steps_of(run, "latents/embeds_ratio"), "two steps")
            os.kill(process.pid, signal.SIGKILL)
            finish(process)
            process = start("rl", file, "--resume")
        code, output = finish(process, 400)
        assert code == 0, output
        models[name] = run / "model"
        ratios = steps_of(run, "latents/embeds_ratio")
        assert len(set(ratios.values())) == 4 and ratios[1] == pytest.approx(0.997, abs=1e-3)
        assert headrace("audit", run)[0] == 0
    for file_name in ("model.safetensors", "latent_gates.st"):
        whole, killed = (load_file(model / file_name) for model in models.values())
        assert whole.keys() == killed.keys()
        for tensor in whole:
            np.testing.assert_array_equal(whole[tensor], killed[tensor], err_msg=tensor)
    for latents in ("on", "off"):
        folder = tmp_path / latents
        sampling = ["--num-examples", 4, "--max-tokens", 8, "--latents", latents, "--output", folder]
        code, output = headrace("eval", tmp_path / "killed" / "store" / "artifacts" / "runs" / "run", *sampling)
        assert code == 0, output
        assert (folder / "results.json").is_file()
