"""Trainers of several ranks in real runs: continued by another number of ranks, and with one of them killed."""

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.errors import SAVED
from headrace.launch.hosts.local import LocalHosts
from headrace.launch.saved_config import pin, save
from headrace.observe.metrics import read_metrics
from headrace.observe.status import Status, StatusReader
from headrace.rollout.batch import Batch, BatchSample
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.trainer import rl
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import finish, headrace, start, wait_until, write_run_file
from tests.end_to_end.test_real_run import draws_trained_once, steps_of
from tests.trainer.training_samples import random_samples

pytestmark = pytest.mark.timeout(400)


def trained(run: RunDir) -> dict[str, torch.Tensor]:
    """The final model's tensors."""
    return {name: tensor for path in run.final_model.glob("*.safetensors") for name, tensor in load_file(path).items()}


class Trainer:
    """Trains the batches of a run directory in this process, or in several."""

    def __init__(self, root: Path, model: Path) -> None:
        self.run = RunDir(root)
        root.parent.mkdir()
        self._file = write_run_file(root.parent, model, root)
        self._model = str(model)
        for step in (1, 2, 3, 4):
            entries = [BatchSample(sample, "letters", i) for i, sample in enumerate(random_samples(step, 7))]
            self.run.batches.prepare(Batch(step, 0, entries))
            self.run.batches.announce(step)

    def _configure(self, max_steps: int) -> RunConfig:
        # Adam would turn the rounding of gradients near its eps into visible steps.
        optimizer = ["--trainer.optim.type", "sgd", "--trainer.optim.lr", "0.1", "--trainer.optim.momentum", "0.9"]
        config, _ = load(RunConfig, [self._file], ["--max_steps", str(max_steps), *optimizer])
        save(pinned := pin(config, self.run.root, self._model), self.run)
        return pinned

    def alone(self, max_steps: int, resume: str | None = None) -> None:
        config = self._configure(max_steps).trainer
        status = Status(self.run.status, "trainer")
        rl.RlTrainer(config, resume=resume, stopped=threading.Event(), status=status).run()
        status.close("finished")

    def together(self, max_steps: int, *resume: str) -> None:
        self._configure(max_steps)
        code, output = headrace("trainer", self.run.root, "--ranks", 2, *resume)
        assert code == 0, output

    def on_hosts(self, max_steps: int) -> list[subprocess.Popen[str]]:
        """Start two members with a rank each, which know each other by an address of this machine alone."""
        self._configure(max_steps)
        address = f"127.0.0.1:{LocalHosts().free_port('')}"
        options = ("--nodes", 2, "--rendezvous", address, "--node-rank")
        return [start("trainer", self.run.root, *options, index) for index in (0, 1)]


@pytest.mark.full
def test_a_trainer_on_two_hosts_trains_what_as_many_ranks_on_one_train(tmp_path: Path, tiny_model: Path):
    one, two = (Trainer(tmp_path / name / "run", tiny_model) for name in ("one", "two"))
    one.together(4)
    for member in two.on_hosts(4):
        code, output = finish(member)
        assert code == 0, output
    expected, tensors = trained(one.run), trained(two.run)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.full
def test_a_trainer_on_two_hosts_ends_at_once_without_one_of_them(tmp_path: Path, tiny_model: Path):
    trainer = Trainer(tmp_path / "two" / "run", tiny_model)
    first, second = trainer.on_hosts(5)  # there is no fifth batch
    wait_until(lambda: steps_of(trainer.run, "trainer", "loss")[-1:] == [4], "step 4")
    second.kill()
    second.communicate()
    code, output = finish(first, timeout=60)  # collectives time out after half an hour
    assert code == 1, output


@pytest.mark.full
def test_a_run_goes_on_with_another_number_of_ranks_on_the_batches_that_are_there(tmp_path: Path, tiny_model: Path):
    alone, fewer, more = (Trainer(tmp_path / name / "run", tiny_model) for name in ("alone", "fewer", "more"))
    alone.alone(4)
    fewer.together(2)
    shutil.rmtree(fewer.run.final_model)
    assert fewer.run.batches.steps() == [3, 4]
    fewer.alone(4, "latest")
    more.alone(2)
    more.together(4, "--resume")
    before, expected = load_file(tiny_model / "model.safetensors"), trained(alone.run)
    for run in (fewer.run, more.run):
        assert run.batches.steps() == []
        tensors = trained(run)
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            # Relative to the way of the whole tensor: the rounding of a gradient, and of a parameter near 1.
            way = (tensor - before[name]).abs().max()
            assert way > 1e-4, name
            assert (tensors[name] - tensor).abs().max() <= 1e-3 * way + 1e-7, f"{run.root} {name}"
    AutoModelForCausalLM.from_pretrained(more.run.final_model)


@pytest.mark.full
def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_nothing_else(tmp_path: Path, tiny_model: Path):
    file = write_run_file(tmp_path, tiny_model)
    process = start("rl", file, "--max_steps", 8, "--launch.trainer_processes", 2, "--launch.inference_servers", 2)
    run = RunDir(tmp_path / "run")
    wait_until(lambda: run.latest_checkpoint_step() >= 2, "the first checkpoint")
    os.kill(StatusReader(run.status / "ranks").read()["trainer-1"].pid, signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    assert "trainer was ended by SIGKILL; restarting it (1 of 3)" in output
    assert steps_of(run, "trainer", "loss")[-1] == 8
    assert draws_trained_once(run)
    AutoModelForCausalLM.from_pretrained(run.final_model)


@pytest.mark.full
def test_ranks_stop_in_order_when_asked_and_go_on_when_resumed(tmp_path: Path, tiny_model: Path):
    file = write_run_file(tmp_path, tiny_model)
    arguments = ("rl", file, "--max_steps", 30, "--launch.trainer_processes", 2)
    run = RunDir(tmp_path / "run")
    process = start(*arguments)
    wait_until(lambda: run.latest_checkpoint_step() >= 2, "the first checkpoint")
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "did not stop and is killed" not in output
    code, output = headrace(*arguments, "--resume")
    assert code == 0, output
    assert draws_trained_once(run)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_stopped_with_a_checkpoint_repeats_nothing_when_resumed(tmp_path: Path, tiny_model: Path, ranks: int):
    file = write_run_file(tmp_path, tiny_model)
    arguments = ("rl", file, "--max_steps", 12, "--trainer.ckpt.interval", 100, "--launch.trainer_processes", ranks)
    run = RunDir(tmp_path / "run")
    process = start(*arguments)
    wait_until(lambda: run.metrics.exists() and len(steps_of(run, "trainer", "loss")) >= 2, "step 2")
    process.send_signal(signal.SIGUSR1)
    code, output = finish(process)
    assert code == SAVED, output
    assert "did not stop and is killed" not in output
    assert run.latest_checkpoint_step() == steps_of(run, "trainer", "loss")[-1] < 12
    code, output = headrace(*arguments, "--resume")
    assert code == 0, output
    assert steps_of(run, "trainer", "loss") == list(range(1, 13))
    assert draws_trained_once(run)


PAIRS = [{"prompt": str(n), "chosen": f"{n + 1}", "rejected": "?" * (1 + n % 5)} for n in range(20)]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sft", "dpo", "dpo, lora"])
def test_two_ranks_learn_from_examples_what_one_learns(tmp_path: Path, tiny_model: Path, kind: str):
    command, _, lora = kind.partition(", ")
    (data := tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    source = {"sft": 'env = "reverse-text"', "dpo": f'path = "{data}"'}[command]
    losses = []
    for ranks in (1, 2):
        file = tmp_path / f"{ranks}.toml"
        file.write_text(
            f'output_dir = "{tmp_path / str(ranks)}"\nmax_steps = 4\nseq_len = 64\n[model]\nname = "{tiny_model}"\n'
            f"[data]\n{source}\nbatch_size = 16\n[validation]\n{source}\nmax_examples = 8\n"
            + ("[dpo]\nbeta = 0.5\n" if command == "dpo" else "")
            + ("[lora]\nr = 4\n" if lora else "")
        )
        code, output = headrace(command, file, "--launch.trainer_processes", ranks)
        assert code == 0, output
        records = list(read_metrics(RunDir(tmp_path / str(ranks)).metrics))
        losses.append([record[key] for record in records for key in ("loss", "val/loss") if key in record])
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
