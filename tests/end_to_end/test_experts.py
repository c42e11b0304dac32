"""A model with experts through the real processes: it learns, is killed and resumed, and opens in transformers."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.trainer.tiny import write_tiny_settings
from tests.end_to_end.runs import REPOSITORY, finish, headrace, processes_of, start, wait_until

EXPERTS = {
    **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 224, "decoder_sparse_step": 1, "norm_topk_prob": True},
}


def write_experts(directory: Path) -> Path:
    """Write a tiny model with experts and random weights."""
    write_tiny_settings(directory)
    settings = json.loads((directory / "config.json").read_text()) | EXPERTS
    (directory / "config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(directory)
    return directory


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_model_with_experts_learns_and_is_killed_and_resumed_in_between(tmp_path: Path):
    model = write_experts(tmp_path / "model")
    examples = (REPOSITORY / "examples/reverse-text/sft.toml").read_text()
    (tmp_path / "sft.toml").write_text(examples.replace('init = "tiny"', f'name = "{model}"'))
    code, output = headrace("sft", tmp_path / "sft.toml", "--output_dir", tmp_path / "sft", timeout=900)
    assert code == 0, output

    run = tmp_path / "run"
    rl = (REPOSITORY / "examples/reverse-text/rl.toml").read_text()
    (tmp_path / "rl.toml").write_text(rl.replace('sft = "sft.toml"', f'name = "{tmp_path / "sft" / "model"}"'))
    command = ["rl", tmp_path / "rl.toml", "--output_dir", run, "--max_steps", 40, "--trainer.ckpt.interval", 5]
    killed = start(*command)
    wait_until((run / "checkpoints" / "step-00000010").exists, "the second checkpoint", timeout=600)
    for pid in [killed.pid, *processes_of(run).values()]:
        os.kill(pid, signal.SIGKILL)
    finish(killed)
    code, output = headrace(*command, "--resume", timeout=900)
    assert code == 0, output
    summary = json.loads(headrace("summary", run, "--json")[1])
    assert summary["reward_end"] - summary["reward_start"] >= 0.35
    assert headrace("audit", run)[0] == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(record for record in records if record["step"] == 1 and "mismatch_kl" in record)
    assert first["mismatch_kl"] < 1e-9  # sampled and trained by the same weights, with the same experts, in float32
    for name in ("router/load/mean", "router/entropy/min", "router/changed/max", "drift/routing"):
        assert any(name in record for record in records), name
    _, report = AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
