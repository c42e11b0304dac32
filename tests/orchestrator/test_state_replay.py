"""The state of an algorithm over again: for an audit, and for each group of a rescoring."""

import asyncio
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace.algorithms.rae import Rae
from headrace.cli.main import main
from headrace.orchestrator.audit import find_state_violations, replay_states
from headrace.rollout.batch import Batch
from headrace.rollout.types import Group, Rollout, Task
from headrace.transport.journal import Journal
from headrace.transport.journal_entries import AlgorithmState, Draw, Entries, Outcome, Totals
from headrace.transport.journal_schema import prepare_writer
from headrace.transport.rollout_files import write_rollouts
from headrace.transport.run_dir import RunDir
from tests.algorithms.groups import make_rollout
from tests.cli.test_rescore_command import Run
from tests.orchestrator import simulation

RAE = '[orchestrator.algo]\ntype = "rae"\ndecay = 0.5\n'
GROUPS = {0: [("a", 4.0), ("b", 2.0)], 1: [("a", 8.0), ("a", 0.0)], 2: [("b", 6.0), ("a", 0.0)]}
"""By draw, agent and reward of its rollouts."""
CREDITED = [2, 0, 1]
"""In this order, so that the baselines of a go 0, 0, 2, 5, 2.5 and those of b 0, 3, 2.5."""
FINAL = {"a": 2.5, "b": 2.5}


def journal_at(path: Path) -> Journal:
    """Draws of one environment, and one of another between them."""
    journal = Journal(path)
    outcomes = [Outcome(draw, credit=place, rewards=GROUPS[draw]) for place, draw in enumerate(CREDITED)]
    outcomes.append(Outcome(3, credit=3, rewards=[("a", 100.0)]))
    draws = [Draw(n, "copy", f"key{n}", n) for n in GROUPS] + [Draw(3, "reverse-text", "key3", 0)]
    state = AlgorithmState("headrace.algorithms.rae:Rae", json.dumps(FINAL).encode())
    journal.commit(Entries(draws, outcomes, Totals(), {"copy": state}), shipped=1)
    return journal


async def test_a_replay_takes_every_credit_of_its_environment_in_the_order_of_credit():
    journal = journal_at(Path(":memory:"))
    copying, reversing = Rae(decay=0.5), Rae(decay=0.5)
    assert await replay_states(journal, "copy", copying) == {2: {}, 0: {"b": 3, "a": 0}, 1: {"b": 2.5, "a": 2}}
    assert copying.state() == FINAL
    await replay_states(journal, "reverse-text", reversing)
    assert reversing.state() == {"a": 50}


async def test_a_state_that_differs_from_the_replay_of_its_credits_is_reported():
    journal = journal_at(Path(":memory:"))
    assert await find_state_violations(journal, {"copy": Rae(decay=0.5)}) == []
    assert await find_state_violations(journal, {"reverse-text": Rae(decay=0.5)}) == []  # it has none in the journal
    (problem,) = await find_state_violations(journal, {"copy": Rae(decay=0.9)})
    assert '{"a": 2.5, "b": 2.5}' in problem and "copy" in problem


async def test_baselines_after_kills_are_those_of_all_credits_that_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simulation, "RunningBaseline", Rae)
    moved = 0
    for seed in range(40):
        run = simulation.Simulation(seed, kills=3)
        await run.run()
        baselines: dict[str, float] = {}
        for _, env, rewards in run.journal.credits():
            for agent, reward in rewards if env == "stateful" else ():
                baselines[agent] = 0.95 * baselines.get(agent, 0.0) + (1 - 0.95) * reward
        stored = run.journal.algorithm_states().get("stateful")
        assert (json.loads(stored.json) if stored else {}) == baselines
        assert await find_state_violations(run.journal, {"stateful": Rae()}) == []
        moved += len(baselines)
    assert moved > 30


def test_the_audit_of_a_run_with_rae_looks_at_its_baselines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = Run(tmp_path / "run", Rae(decay=0.5), RAE)
    journal_at(run.dir.journal).close()
    run.dir.batches.prepare(Batch(1, 0, [], [0, 1, 2, 3]))
    run.dir.batches.announce(1)
    assert main(["audit", str(run.dir.root)]) == 0
    with closing(sqlite3.connect(run.dir.journal, isolation_level=None)) as db:
        prepare_writer(db, run.dir.journal, lambda: 1)  # with checksums that match
        db.execute("""UPDATE algorithms SET state = '{"a": 2.5}'""")
    assert main(["audit", str(run.dir.root)]) == 1
    assert 'the algorithm of copy has the state {"a": 2.5}' in capsys.readouterr().out


@pytest.fixture
def saved(tmp_path: Path) -> RunDir:
    """A run with rae whose groups were credited in another order than they were drawn, saved in two steps."""
    run = Run(tmp_path / "run", Rae(decay=0.5), RAE)
    journal_at(run.dir.journal).close()
    groups = {draw: asyncio.run(played(run, draw)) for draw in CREDITED}
    write_rollouts(run.dir.rollouts, 1, [*groups[0], *groups[2]], [])
    write_rollouts(run.dir.rollouts, 2, groups[1], [])
    return run.dir


async def played(run: Run, draw: int) -> list[Rollout]:
    rollouts = []
    for agent, reward in GROUPS[draw]:
        rollout = make_rollout(reward)
        rollout.agent, rollout.env, rollout.group_id, rollout.draw_id = agent, "copy", f"{draw}-1", draw
        rollout.episode = 0
        rollouts.append(rollout)
    scored = await run.processing.process_group(
        Group(f"{draw}-1", Task("copy", {"n": draw}, "key"), 1, 0, draw), rollouts
    )
    return scored.rollouts


@pytest.mark.parametrize("steps", ["1:2", "2:2"])
def test_rescoring_a_run_with_rae_by_itself_changes_nothing(
    steps: str, saved: RunDir, capsys: pytest.CaptureFixture[str]
):
    assert main(["rescore", str(saved.root), "--steps", steps, "--env", "copy"]) == 0
    assert "no difference: every token has the credit that it had" in capsys.readouterr().out


def test_rescoring_with_another_decay_has_the_states_of_that_decay(saved: RunDir, capsys: pytest.CaptureFixture[str]):
    command = ["rescore", str(saved.root), "--steps", "2:2", "--env", "copy", "--algo.decay", "0", "--json"]
    assert main(command) == 0
    output = json.loads(capsys.readouterr().out)
    # a has earned 4 last, and then 8: 8 - 4 = 4 and 0 - 8 = -8, where it was 8 - 2 = 6 and 0 - 5 = -5
    assert output["largest_difference"] == pytest.approx(3)
