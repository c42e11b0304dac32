"""Self-play in real runs: the baselines of both seats survive kills, and poker becomes harder to beat."""

import json
import os
import signal
from pathlib import Path

import pytest
from benchmarks.environments.exploitability import measured

from headrace.environments.shipped.kuhn_poker import exploitability
from headrace.observe.metrics import read_metrics
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import REPOSITORY, finish, headrace, is_alive, processes_of, start, wait_until

pytestmark = pytest.mark.full

DUEL = """
output_dir = "{output}"
max_steps = 8
seq_len = 48
seed = 3

[model]
name = "{model}"

[trainer.optim]
lr = 1e-3

[trainer.ckpt]
interval = 2

[orchestrator]
batch_size = 16
group_size = 4
max_async_level = 0
algo = "rae"

[orchestrator.train.sampling]
max_tokens = 8

[[orchestrator.train.env]]
id = "tests.end_to_end.environments:Duel"
name = "duel"
"""


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_has_the_baselines_of_one_that_is_not(tmp_path: Path, tiny_model: Path):
    whole, killed = (RunDir(tmp_path / name) for name in ("whole", "killed"))
    files = []
    for run in (whole, killed):
        files.append(tmp_path / f"{run.root.name}.toml")
        files[-1].write_text(DUEL.format(output=run.root, model=tiny_model))
    code, output = headrace("rl", files[0])
    assert code == 0, output
    launcher = start("rl", files[1])
    kill(killed, "orchestrator", after=2)
    kill(killed, "trainer", after=3)
    wait_until(lambda: trained(killed) >= 5, "step 5")
    before = processes_of(killed.root)
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not any(map(is_alive, before.values())), "the end of what the launcher had started")
    code, output = finish(start("rl", files[1], "--resume"))
    assert code == 0, output
    journals = [Journal(run.journal, read_only=True) for run in (whole, killed)]
    credits = [list(journal.credits()) for journal in journals]
    assert len(credits[0]) >= 16
    assert credits[0] == credits[1]
    states = [journal.algorithm_states()["duel"] for journal in journals]
    assert states[0] == states[1]
    for run in (whole, killed):
        assert headrace("audit", run.root)[0] == 0  # it replays the baselines
    assert (whole.final_model / "model.safetensors").read_bytes() == (
        killed.final_model / "model.safetensors"
    ).read_bytes()


def kill(run: RunDir, name: str, after: int) -> None:
    wait_until(lambda: trained(run) >= after and name in processes_of(run.root), f"{name} after step {after}")
    pid = processes_of(run.root)[name]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: processes_of(run.root).get(name) not in (None, pid), f"{name} again")


def trained(run: RunDir) -> int:
    if not run.metrics.exists():
        return 0
    return max((record["step"] for record in read_metrics(run.metrics) if record["process"] == "trainer"), default=0)


@pytest.mark.timeout(3600)
def test_poker_against_itself_becomes_harder_to_exploit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    code, output = headrace("rl", REPOSITORY / "examples/kuhn-poker/rl.toml", "--output_dir", run, timeout=3000)
    assert code == 0, output
    first, *_, last = measured(run).values()
    assert first.illegal < 0.05
    assert 0.3 < exploitability(first.strategy) < 11 / 24  # it is a little better than legal play at random
    assert exploitability(last.strategy) < 0.75 * exploitability(first.strategy)
    assert last.illegal < 0.05
    assert headrace("audit", run)[0] == 0
    assert headrace("rescore", run)[0] == 0  # with the baselines that its groups had


@pytest.mark.timeout(3600)
def test_one_that_asks_itself_learns_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    code, output = headrace("rl", REPOSITORY / "examples/proposer-solver/rl.toml", "--output_dir", run, timeout=3000)
    assert code == 0, output
    # Not by evaluation: its 120 answers to other sums have a standard error of .03, and improve by .03 to .1.
    [trained] = (
        environment
        for environment in json.loads(headrace("summary", run, "--json")[1])["environments"]
        if environment["name"] == "proposer-solver"
    )
    assert trained["reward_end"] >= 2 * trained["reward_start"]
