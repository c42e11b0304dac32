"""Supervised training from data to a model directory."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.config.sft import SftConfig
from headrace.observe.metrics import read_metrics
from headrace.observe.status import Status
from headrace.trainer import checkpoint, sft


@pytest.fixture
def status(tmp_path: Path) -> Iterator[Status]:
    status = Status(tmp_path / "status", "sft")
    yield status
    status.close("done")


def settings(output: Path, model: dict[str, Any], data: dict[str, Any], **others: Any) -> SftConfig:
    return SftConfig.model_validate(
        {
            "output_dir": output,
            "model": model,
            "data": {"batch_size": 4, **data},
            "renderer": {"name": "qwen3", "enable_thinking": False},
            "max_steps": 6,
            "seq_len": 64,
            "optim": {"lr": 3e-3},
            **others,
        }
    )


ENV = {"env": "reverse-text", "args": {"demonstrate_copies": 0.7}}


def run(config: SftConfig, status: Status, resume: str | None = None) -> Path:
    return sft.train(config, resume=resume, stopped=threading.Event(), status=status)


def test_training_on_demonstrations_lowers_the_loss_and_leaves_a_model(
    tmp_path: Path, tiny_model: Path, status: Status, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        path = run(settings(tmp_path / "out", {"name": str(tiny_model)}, ENV, max_steps=20), status)
    assert path == tmp_path / "out" / "model"
    AutoModelForCausalLM.from_pretrained(path)
    records = list(read_metrics(tmp_path / "out" / "metrics.jsonl"))
    assert [record["process"] for record in records] == ["sft"] * 20
    assert records[0]["loss"] == pytest.approx(5.8, abs=0.4)  # ln(320)
    assert records[0]["ce/nll"] == pytest.approx(records[0]["loss"])
    assert records[-1]["loss"] < 2.5
    assert {"optim/lr", "optim/grad_norm", "perf/trained_tokens_per_second", "time/step"} <= records[0].keys()
    assert {"step": 20, "max_steps": 20, "loss": records[-1]["loss"]}.items() <= status.current.gauges.items()
    assert [message.split(":")[0] for message in caplog.messages if "tokens/s" in message] == [
        "step 10 of 20",
        "step 20 of 20",
    ]


@pytest.mark.parametrize("source", ["env", "path"])
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, tiny_model: Path, status: Status, source: str):
    data = ENV
    if source == "path":
        rows = [{"prompt": f"say {n}", "completion": str(n)} for n in range(5)]
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        data = {"path": tmp_path / "data.jsonl"}
    model = {"name": str(tiny_model)}
    straight = load_file(run(settings(tmp_path / "a", model, data), status) / "model.safetensors")
    # The schedule is constant, so a run to step 3 is the first half of a run to step 6.
    run(settings(tmp_path / "b", model, data, max_steps=3), status)
    assert checkpoint.read_state(tmp_path / "b" / "checkpoints" / "step-00000003").examples == 12
    resumed = load_file(run(settings(tmp_path / "b", model, data), status, resume="latest") / "model.safetensors")
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    assert [record["step"] for record in read_metrics(tmp_path / "b" / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_examples_longer_than_seq_len_are_cut_and_counted(tmp_path: Path, tiny_model: Path, status: Status):
    config = settings(tmp_path / "out", {"name": str(tiny_model)}, ENV, seq_len=24, max_steps=1)
    run(config, status)
    (record,) = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert record["data/truncated"] > 0
    assert record["progress/tokens_trained"] <= 4 * 24


def test_stop_ends_training_without_a_final_model(tmp_path: Path, tiny_model: Path, status: Status):
    stopped = threading.Event()
    stopped.set()
    path = sft.train(settings(tmp_path / "out", {"name": str(tiny_model)}, ENV), stopped=stopped, status=status)
    assert not path.exists()
