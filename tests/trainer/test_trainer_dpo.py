"""Training on preference pairs from a file to a model directory."""

import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.config.base import ConfigError
from headrace.config.dpo import DpoConfig
from headrace.launch.run_directory import plan_directory
from headrace.launch.saved_config import read_run, save
from headrace.observe.metrics import read_metrics
from headrace.observe.status import Status
from headrace.rollout.schema import DamagedFile
from headrace.runfile.reading import validate
from headrace.trainer.checkpoint import ResumeError
from headrace.trainer.dpo import DpoTrainer, ReferenceTotals
from headrace.trainer.sft_data import open_examples, open_rows
from headrace.transport.run_dir import RunDir
from tests.observe.metrics_page import undocumented
from tests.refusals import refused

WORDS = [
    *("apple", "beach", "chair", "dance", "eagle", "flame"),
    *("grape", "house", "ideal", "joker", "knife", "lemon"),
]
LORA = {"lora": {"r": 4, "alpha": 8}}


@pytest.fixture
def status(tmp_path: Path) -> Iterator[Status]:
    status = Status(tmp_path / "status", "dpo")
    yield status
    status.close("done")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Prefer a word in capitals."""
    rows = [{"prompt": word, "chosen": word.upper(), "rejected": word} for word in WORDS]
    (path := tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def settings(output: Path, model: Path, pairs: Path, **others: Any) -> DpoConfig:
    return DpoConfig.model_validate(
        {
            "output_dir": output,
            "model": {"name": str(model)},
            "data": {"path": pairs, "batch_size": 4},
            "dpo": {"beta": 0.5},
            "renderer": {"name": "qwen3", "enable_thinking": False},
            "max_steps": 4,
            "seq_len": 48,
            "optim": {"lr": 1e-3},
            **others,
        }
    )


def test_thoughts_in_latent_space_are_refused():
    tree = {"output_dir": "out", "max_steps": 1, "seq_len": 8, "dpo": {}, "data": {"path": "pairs.jsonl"}}
    with refused(ConfigError, key="model.latents"):
        validate(DpoConfig, {**tree, "model": {"init": "tiny", "latents": "hybrid"}}, "test")


def run(config: DpoConfig, status: Status, resume: str | None = None) -> Path:
    return DpoTrainer(config, resume=resume, stopped=threading.Event(), status=status).run()


@pytest.mark.parametrize("others", [{}, LORA, {"dpo": {"loss": "ipo", "beta": 0.2}}], ids=["full", "lora", "ipo"])
def test_held_out_pairs_are_distinguished_after_training(
    tmp_path: Path, tiny_model: Path, pairs: Path, status: Status, others: dict[str, Any]
):
    held_out = {"validation": {"fraction": 0.25, "interval": 6}, "max_steps": 12}
    model = run(settings(tmp_path / "out", tiny_model, pairs, **held_out, **others), status)
    AutoModelForCausalLM.from_pretrained(model)
    records = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert undocumented(records) == []
    assert {record["process"] for record in records} == {"dpo"}
    steps = [record for record in records if "loss" in record]
    validations = {record["step"]: record for record in records if "val/loss" in record}
    assert list(validations) == [0, 6, 12]
    if "dpo" not in others:  # the policy is the reference at first: all margins are 0
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert validations[0]["val/margin"] == pytest.approx(0.0, abs=1e-4)
    assert validations[12]["val/loss"] < 0.9 * validations[0]["val/loss"]
    assert validations[12]["val/accuracy"] == 1.0
    margin = steps[-1]["dpo/chosen_reward"] - steps[-1]["dpo/rejected_reward"]
    assert steps[-1]["dpo/margin"] == pytest.approx(margin, abs=1e-4)
    assert steps[-1]["dpo/accuracy"] == 1.0


@pytest.mark.parametrize("others", [{}, LORA], ids=["full", "lora"])
def test_a_resumed_run_ends_with_the_same_weights(
    tmp_path: Path, tiny_model: Path, pairs: Path, status: Status, others: dict[str, Any]
):
    def config(name: str, steps: int) -> DpoConfig:
        return settings(tmp_path / name, tiny_model, pairs, max_steps=steps, **others)

    straight = load_file(run(config("a", 4), status) / "model.safetensors")
    run(config("b", 2), status)
    resumed = load_file(run(config("b", 4), status, "latest") / "model.safetensors")
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    losses = [[record["loss"] for record in read_metrics(tmp_path / name / "metrics.jsonl")] for name in "ab"]
    assert losses[0] == losses[1]
    assert (tmp_path / "b" / "reference").exists() == (not others)


def test_without_a_reference_the_first_margins_are_those_of_logprobs(
    tmp_path: Path, tiny_model: Path, pairs: Path, status: Status
):
    config = settings(tmp_path / "out", tiny_model, pairs, max_steps=1, dpo={"reference_free": True})
    run(config, status)
    (record,) = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert record["dpo/chosen_reward"] < -1  # 0.1 times six tokens of about ln(320) nats
    assert not (tmp_path / "out" / "reference").exists()


def test_a_fork_and_a_reader_take_the_reference_along_and_changed_pairs_are_refused(
    tmp_path: Path, tiny_model: Path, pairs: Path, status: Status
):
    config = settings(tmp_path / "out", tiny_model, pairs, ckpt={"interval": 1}, max_steps=2)
    run(config, status)
    save(config, out := RunDir(tmp_path / "out"))
    assert isinstance(read_run(out.root), DpoConfig)
    plan = plan_directory(out.root, "1", clean=False)
    plan.apply()
    forked = RunDir(plan.directory)
    assert ReferenceTotals.read(forked.reference, 48) is not None
    longer = config.model_copy(update={"max_steps": 3})
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    pairs.write_text("\n".join(json.dumps({**row, "rejected": "?"}) for row in rows))
    with pytest.raises(ResumeError) as refusal:
        run(longer, status, "latest")
    assert refusal.value.key == "data"
    file = out.reference / ReferenceTotals.FILE
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedFile):
        run(longer, status, "latest")
    for path in out.reference.iterdir():
        path.unlink()
    out.reference.rmdir()
    with pytest.raises(ResumeError) as refusal:
        run(longer, status, "latest")
    assert refusal.value.file == out.reference


def test_no_prompt_is_both_trained_on_and_held_out(tmp_path: Path):
    rows = [{"prompt": str(n % 10), "chosen": f"{n}", "rejected": f"{n}?"} for n in range(40)]
    (path := tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = settings(tmp_path / "out", tmp_path, path, validation={"fraction": 0.2})
    training, held_out = open_examples(config, open_rows(config.data), 0)
    prompts = {pair.shared_content[0]["content"] for pair in held_out}
    assert (len(prompts), len(held_out)) == (2, 8)
    assert {pair.shared_content[0]["content"] for pair in islice(training, 64)} == set("0123456789") - prompts


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("others", [{}, LORA], ids=["full", "lora"])
def test_a_killed_process_is_continued_to_the_same_weights(
    tmp_path: Path, tiny_model: Path, pairs: Path, others: dict[str, Any]
):
    tensors = []
    for name in ("straight", "killed"):
        here = RunDir(tmp_path / name)
        here.root.mkdir()
        save(
            settings(here.root, tiny_model, pairs, max_steps=30, ckpt={"interval": 5}, optim={"lr": 1e-4}, **others),
            here,
        )
        command = [sys.executable, "-m", "headrace", "trainer", str(here.root)]
        process = subprocess.Popen(command)
        while name == "killed" and here.latest_checkpoint_step() < 10 and process.poll() is None:
            time.sleep(0.01)
        if name == "killed":
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            process = subprocess.Popen([*command, "--resume"])
        assert process.wait() == 0
        tensors.append(load_file(here.final_model / "model.safetensors"))
    assert all(torch.equal(tensors[1][name], tensors[0][name]) for name in tensors[0])
