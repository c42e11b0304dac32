"""A hub for a test, and things to push: a run with all that a run directory has, secrets included."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.transport.endpoint import Endpoint, write_endpoint
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RunDir
from tests.observe.runs import write_run
from tests.tools.hub.stand_in import WRITER, Hub, hub_stand_in

KEY = "a-secret-key-of-a-server-of-this-run"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Up, and named by the environment, with a token that may write."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # its variable is read once, at import
    monkeypatch.setenv("HF_TOKEN", WRITER)
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    with hub_stand_in(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def write_model(directory: Path, seed: int = 0) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 8}))
    (directory / "tokenizer.json").write_text("{}")
    tensors = {"weight": np.random.default_rng(seed).normal(size=(40, 40)).astype(np.float32)}
    save_file(tensors, directory / "model.safetensors")
    return directory


def write_checkpoint(directory: Path, step: int) -> Path:
    where = directory / f"step-{step:08d}"
    write_model(where / "tensors", seed=step)
    (where / "tensors" / "config.json").unlink()
    (where / "tensors" / "tokenizer.json").unlink()
    (where / "model").mkdir()
    (where / "model" / "config.json").write_text("{}")
    (where / "state.json").write_text(json.dumps({"step": step, "schema": 1}))
    (where / "COMPLETE.json").write_text(json.dumps({"step": step, "schema": 1}))
    return where


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of five steps, with checkpoints 2 (permanent) and 4, a batch, and what must never leave the machine."""
    base = write_model(tmp_path / "models" / "the-base", seed=7)
    root = write_run(tmp_path / "outputs" / "mill", [0.1, 0.2, 0.4, 0.6, 0.8], keys={"model.name": str(base)})
    run = RunDir(root)
    write_model(run.final_model, seed=1)
    for step in (2, 4):
        write_checkpoint(run.checkpoints, step)
    write_checkpoint(run.checkpoints / "permanent", 2)
    run.batches.directory.mkdir()
    save_file({"ids": np.arange(9)}, run.batches.path(5))
    Journal(run.journal).close()
    write_endpoint(run.endpoints / "inference.json", Endpoint("http://127.0.0.1:1", 1, KEY, KEY))
    run.driver.write_text(f'{{"url": "http://127.0.0.1:1", "key": "{KEY}"}}')
    (root / ".env").write_text(f"HF_TOKEN={KEY}")
    run.logs.mkdir()
    (run.logs / "inference.log").write_text(KEY)
    (run.final_model / "key.pem").write_text(KEY)
    run.code_folders.write_text("[]")
    return root
