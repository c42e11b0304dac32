"""Real processes killed -9, at random and at the worst moments: each prompt is trained once or dropped for a reason."""

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from headrace.algorithms.rae import Rae
from headrace.launch.saved_config import read_run
from headrace.orchestrator.audit import replay_states
from headrace.orchestrator.source import TrainSource, TrainTasks
from headrace.rollout.batch import Batch
from headrace.rollout.types import Task
from headrace.tools.audit import audit_run
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RunDir
from tests.end_to_end.chaos import LAUNCHER, MOMENTS, Chaos, Evidence
from tests.end_to_end.environments import Letters
from tests.end_to_end.runs import finish, start, write_run_file

PROCESSES = ["inference", "trainer", "orchestrator"]
SECOND_ENVIRONMENT = """
[[orchestrator.train.env]]
id = "tests.end_to_end.environments:Duel"
name = "stateful"
algo = { type = "rae", decay = 0.9 }
"""


@pytest.mark.timeout(900)
def test_kills_at_two_of_the_worst_moments_lose_and_repeat_nothing(tmp_path: Path, tiny_model: Path):
    """The other two are among those of orchestrator/test_commits.py and trainer/test_trainer_kills.py."""
    moments = ["between the commit of a batch and its announcement", "in the middle of publishing weights"]
    survive(tmp_path, tiny_model, seed=0, kills=2, max_steps=6, victims=PROCESSES, moments=moments)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seed", "sharing"), [(1, "overlap"), (2, "alternate")])
def test_thirty_six_kills_lose_and_repeat_nothing(seed: int, sharing: str, tmp_path: Path, tiny_model: Path):
    victims = [*PROCESSES, LAUNCHER]
    survive(tmp_path, tiny_model, seed=seed, kills=36, max_steps=90, victims=victims, sharing=sharing)


def survive(
    directory: Path,
    model: Path,
    seed: int,
    kills: int,
    max_steps: int,
    victims: Sequence[str],
    sharing: str = "alternate",
    moments: Sequence[str] = tuple(MOMENTS),
) -> None:
    file, run = write_run_file(directory, model), RunDir(directory / "run")
    file.write_text(file.read_text() + SECOND_ENVIRONMENT)
    chaos = Chaos(run, seed, kills, max_steps, victims, moments)
    command = ["rl", file, "--max_steps", max_steps, "--trainer.ckpt.interval", 3, "--launch.max_restarts", 100]
    command += ["--launch.sharing", sharing]  # in turns on the CPU, or without
    path = [str(Path(__file__).parent / "slow_renames"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    with Evidence(run, directory / "evidence") as evidence:
        chaos.launcher = start(*command, env=env)
        killing = threading.Thread(target=chaos.carry_out, daemon=True)
        killing.start()
        code, output = finish(chaos.launcher, timeout=60 * kills)
        while code == -signal.SIGKILL:  # the launcher itself was hit: what a person or a scheduler would do
            chaos.launcher = start(*command, "--resume", env=env)
            code, output = finish(chaos.launcher, timeout=60 * kills)
        killing.join(5)
    assert code == 0, output
    assert len(chaos.done) >= kills, f"only {chaos.done} of {chaos.plan}"
    assert set(moments) <= set(chaos.done)
    journal = Journal(run.journal, read_only=True)
    assert audit_run(run).problems == []
    assert set(journal.count_states()) <= {
        "trained",
        *(state for state in journal.count_states() if state.startswith("dropped:")),
    }
    batches = evidence.batches()
    each_draw_was_trained_once(journal, batches, max_steps)
    the_prompts_are_those_of_an_uninterrupted_run(journal)
    the_algorithm_is_where_a_replay_puts_it(journal)
    the_model_is_that_of_an_uninterrupted_trainer(run, batches)


def each_draw_was_trained_once(journal: Journal, batches: dict[int, Batch], max_steps: int) -> None:
    assert list(batches) == list(range(1, max_steps + 1))
    trained = {(draw.id, step) for draw, state, step, _ in journal.draws() if state == "trained"}
    given = [(draw, step) for step, batch in batches.items() for draw in batch.draw_ids]
    assert len({draw for draw, _ in given}) == len(given)
    assert set(given) == trained


def the_prompts_are_those_of_an_uninterrupted_run(journal: Journal) -> None:
    names = ["letters", "stateful"]
    source = TrainSource([TrainTasks(n, [Task(n, data) for data in Letters().tasks()], 64.0) for n in names], seed=0)
    assert [draw for draw, *_ in journal.draws()] == [source.draw()[0] for _ in journal.draws()]


def the_algorithm_is_where_a_replay_puts_it(journal: Journal) -> None:
    algorithm = Rae(decay=0.9)
    asyncio.run(replay_states(journal, "stateful", algorithm))
    replayed = algorithm.state()
    assert msgspec.json.decode(journal.algorithm_states()["stateful"].json) == replayed
    assert replayed.keys() == {"player_0", "player_1"}


def the_model_is_that_of_an_uninterrupted_trainer(run: RunDir, batches: dict[int, Batch]) -> None:
    """Train the same batches once more, without a kill: the weights must be equal to the last bit."""
    import torch

    from headrace.trainer.learner import Learner
    from headrace.trainer.rl import make_losses

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    try:
        config = read_run(run.root).trainer
        learner = Learner(config, make_losses(config), run.root / "replayed checkpoints")
        for batch in batches.values():
            samples, envs = [entry.sample for entry in batch.samples], [entry.env for entry in batch.samples]
            learner.learn(samples, envs=envs, stopped=lambda: False)
    finally:
        torch.set_num_threads(threads)
    learner.save_final_model(run.root / "replayed")
    final, replayed = (load_file(d / "model.safetensors") for d in (run.final_model, run.root / "replayed"))
    assert final.keys() == replayed.keys()
    for name in final:
        np.testing.assert_array_equal(final[name], replayed[name], err_msg=name)
