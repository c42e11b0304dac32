"""Random kills in runs of several kinds: nothing is lost or doubled, and the model is that of an uninterrupted run."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.observe.metrics import read_metrics
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import finish, headrace, is_alive, processes_of, start, wait_until, write_run_file
from tests.end_to_end.test_experts import write_experts
from tests.faults.conftest import show
from tests.faults.independent_check import check_journal

pytestmark = pytest.mark.faults

MAX_STEPS = 10
OFFLINE = ("sft", "dpo")
"""Kinds whose name begins with this command are trained without rollouts."""
MAX_OFFLINE_STEPS = 200
"""Their steps take milliseconds: with fewer a run ends before most of its kills."""
VLLM_PYTHON = os.environ.get("HEADRACE_VLLM_PYTHON", "")
SECOND_ENVIRONMENT = '[[orchestrator.train.env]]\nid = "tests.end_to_end.environments:Talk"\nname = "talk"\n'
DUEL = '[[orchestrator.train.env]]\nid = "tests.end_to_end.environments:Duel"\nname = "duel"\nalgo = "rae"\n'
POOL = '[orchestrator.train.curriculum]\nsampler = { type = "difficulty_pool", hard_max = 0.4 }\n'
KINDS: dict[str, tuple[str, Sequence[object]]] = {
    "rl": ("", ()),
    "max_rl": ("", ("--orchestrator.algo.type", "max_rl")),
    "mixture": (SECOND_ENVIRONMENT, ()),
    "self-play": (DUEL, ()),
    "curriculum": (POOL, ()),
    "lora": ("[trainer.lora]\nr = 4\n", ()),
    "two ranks": ("", ("--launch.trainer_processes", 2)),
    "in turns": ("", ("--launch.sharing", "alternate")),
    "kl to its own past": ("", ("--orchestrator.algo.kl.coef", 0.5, "--orchestrator.algo.kl.reference.every", 3)),
    "experts": ("", ()),
    "latents": ("", ("--model.latents.type", "hybrid", "--trainer.loss.type", "reinforce")),
    "vllm": ("", ("--inference.engine", "vllm", "--inference.vllm.python", VLLM_PYTHON)),
    "sft": ("", ()),
    "sft lora": ("[lora]\nr = 4\n", ()),
    "dpo": ("[dpo]\nbeta = 0.5\n", ()),
    "dpo lora": ("[dpo]\nbeta = 0.5\n[lora]\nr = 4\n", ()),
}
OFFLINE_FILE = """
output_dir = "{output}"
max_steps = {steps}
seq_len = 48

[model]
name = "{model}"

[data]
path = "{data}"
batch_size = 4

[optim]
lr = 1e-3

[ckpt]
interval = 2
"""


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_kills_lose_and_double_nothing(
    kind: str, seed: int, tmp_path: Path, tiny_model: Path, pytestconfig: pytest.Config
):
    if kind == "vllm" and not VLLM_PYTHON:
        pytest.skip("needs $HEADRACE_VLLM_PYTHON")
    whole, killed = RunDir(tmp_path / "whole"), RunDir(tmp_path / "killed")
    model = write_experts(tmp_path / "experts") if kind == "experts" else tiny_model
    command = command_of(kind, tmp_path, model)
    code, output = headrace(*command, "--output_dir", whole.root, timeout=600)
    assert code == 0, output
    rng = random.Random(f"{seed} {kind}")
    kills = math.ceil(pytestconfig.getoption("--kills") / len(KINDS))
    done = Killer([*command, "--output_dir", killed.root, "--launch.max_restarts", 1000], killed, rng).run(kills)
    is_offline = kind.startswith(OFFLINE)
    draws = None if is_offline else check_journal(killed, MAX_STEPS)
    assert steps_of(killed) == set(range(1, (MAX_OFFLINE_STEPS if is_offline else MAX_STEPS) + 1))
    models = [tensors_of(run.final_model) for run in (whole, killed)]
    assert models[0].keys() == models[1].keys()
    different = [name for name, tensor in models[0].items() if not np.array_equal(tensor, models[1][name])]
    hit = ", ".join(f"{name} {done.count(name)}" for name in sorted(set(done)))
    counted = "" if draws is None else f", {draws} draws each counted once"
    show(pytestconfig, f"{kind}: {len(done)} kills ({hit}){counted}, {len(different)} tensors differ")
    assert not different or kind == "vllm"  # its samples depend on the batch


def command_of(kind: str, directory: Path, model: Path) -> list[object]:
    text, options = KINDS[kind]
    if not kind.startswith(OFFLINE):
        file = write_run_file(directory, model)
        file.write_text(file.read_text() + text)
        steps = ("--max_steps", MAX_STEPS, "--orchestrator.max_async_level", 0)
        return ["rl", file, *steps, "--trainer.ckpt.interval", 2, *options]
    texts = ((f"say {number}", str(number), f"not {number}") for number in range(40))
    rows = ({"prompt": prompt, "completion": one, "chosen": one, "rejected": other} for prompt, one, other in texts)
    command, data = kind.split()[0], directory / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    file = directory / f"{command}.toml"
    file.write_text(
        OFFLINE_FILE.format(output=directory / "run", steps=MAX_OFFLINE_STEPS, model=model, data=data) + text
    )
    return [command, file, *options]


class Killer:
    """Runs a command to its end, and kills its processes, launcher included, at random moments."""

    def __init__(self, command: Sequence[object], run: RunDir, rng: random.Random) -> None:
        self._command, self._run, self._rng = command, run, rng

    def run(self, kills: int) -> list[str]:
        """Return the names of the processes that were killed."""
        done: list[str] = []
        launcher = start(*self._command)
        while launcher.poll() is None and len(done) < kills:
            victim = self._rng.choice(["launcher", "trainer", "trainer", "orchestrator", "inference"])
            time.sleep(self._rng.uniform(0, 4))
            pid = launcher.pid if victim == "launcher" else processes_of(self._run.root).get(victim)
            if pid is None or launcher.poll() is not None:
                continue
            left = processes_of(self._run.root)
            os.kill(pid, signal.SIGKILL)
            done.append(victim)
            if victim == "launcher":
                launcher = self._start_again(launcher, left)
        code, output = finish(launcher, timeout=900)
        assert code == 0, f"after {done}:\n{output}"
        return done

    def _start_again(self, launcher: subprocess.Popen[str], left: dict[str, int]) -> subprocess.Popen[str]:
        launcher.communicate()
        wait_until(lambda: not any(map(is_alive, left.values())), "the end of what the launcher had started")
        resume = ["--resume"] if self._run.config.is_file() or self._run.metrics.is_file() else []
        return start(*self._command, *resume)


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a model, of which each rank has written a file."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def steps_of(run: RunDir) -> set[int]:
    """The steps that the trainer has recorded."""
    return {record["step"] for record in read_metrics(run.metrics) if "loss" in record}
