"""The journal: states of a draw, restarts, forks, and that everything else is a fold over the draws."""

import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace.errors import BadInput, Failure
from headrace.rollout.digest import Fingerprint
from headrace.rollout.schema import SchemaError
from headrace.transport.journal import Journal, fork
from headrace.transport.journal_entries import AlgorithmState, Clock, Draw, Entries, FileRecord, Outcome, Totals
from headrace.transport.journal_files import network_file_system
from tests.refusals import refused

RECORDED = Path(__file__).parents[1] / "data" / "recorded-runs" / "rl" / "journal.sqlite"


def draws(*ids: int) -> list[Draw]:
    return [Draw(i, "env", f"key{i}", i) for i in ids]


def learned(state: str, algorithm: str = "mine:Algorithm") -> AlgorithmState:
    return AlgorithmState(algorithm, state.encode())


def entries(drawn: list[Draw], *outcomes: Outcome, state: str | None = None, clock: Clock | None = None) -> Entries:
    return Entries(
        drawn,
        list(outcomes),
        Totals(),
        {} if state is None else {"env": learned(state)},
        clock or Clock(),
    )


def shipped(draw: int, rollouts: int = 4, tokens: int = 40, **drops: int) -> Outcome:
    return Outcome(draw, "", rollouts, tokens, drops, credit=draw, rewards=[("policy", float(draw))])


def dropped(draw: int, reason: str, rollouts: int = 4) -> Outcome:
    return Outcome(draw, reason, rollouts, 10 * rollouts, {reason: rollouts})


def test_a_draw_is_shipped_then_trained_or_dropped_with_its_reason(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0, 1, 2, 3), shipped(0), shipped(1), dropped(2, "zero_advantage")), shipped=1)
    assert journal.count_states() == {"shipped": 2, "dropped:zero_advantage": 1, "drawn": 1}
    journal.mark_trained(1)
    assert journal.count_states() == {"trained": 2, "dropped:zero_advantage": 1, "drawn": 1}


def test_what_was_open_at_a_crash_is_open_again_under_the_same_id(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    first = Journal(path)
    first.commit(entries(draws(0, 1, 2), shipped(1, timeout=1), clock=Clock(12.5, 99)), shipped=1)
    # No close: the process was killed.
    second = Journal(path)
    assert second.open_draws() == draws(0, 2)
    assert second.last_step() == 1
    assert second.totals() == Totals(4, 40, {"timeout": 1})
    assert second.clock() == Clock(12.5, 99)
    assert second.next_credit() == 2
    assert second.drawn_per_env() == {"env": 3}


def test_totals_are_the_sum_over_the_outcomes_of_the_steps_asked_for(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0, 1), shipped(0, timeout=1), dropped(1, "off_policy")), shipped=1)
    journal.commit(entries(draws(2), dropped(2, "off_policy", rollouts=3)))  # while step 2 is collected
    assert journal.totals(through=1) == Totals(8, 80, {"timeout": 1, "off_policy": 4})
    assert journal.totals() == Totals(11, 110, {"timeout": 1, "off_policy": 7})


def test_a_draw_that_is_drawn_again_keeps_one_record(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0, 1)))
    journal.commit(entries(draws(0), shipped(0)), shipped=1)
    assert journal.count_states() == {"shipped": 1, "drawn": 1}


def test_an_outcome_is_recorded_once_or_not_at_all(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0), shipped(0)), shipped=1)
    with pytest.raises(RuntimeError, match="draw 0"):
        journal.commit(entries(draws(1), dropped(0, "off_policy"), dropped(1, "off_policy")))
    assert journal.count_states() == {"shipped": 1}
    with pytest.raises(RuntimeError, match="draw 7"):
        journal.commit(entries([], shipped(7)), shipped=2)
    assert journal.last_step() == 1


def test_a_fork_reopens_what_shipped_after_its_step_and_takes_state_and_totals_back(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    for step in (1, 2, 3):
        first, second = 2 * step - 2, 2 * step - 1
        outcomes = [shipped(first), dropped(second, "zero_advantage")]
        seconds = Clock(seconds=float(step))
        journal.commit(entries(draws(first, second), *outcomes, state=f"[{step}]", clock=seconds), shipped=step)
    journal.mark_trained(2)
    fork(tmp_path / "journal.sqlite", tmp_path / "fork" / "journal.sqlite", step=1)
    copy = Journal(tmp_path / "fork" / "journal.sqlite")
    assert copy.last_step() == 1
    assert copy.open_draws() == draws(2, 3, 4, 5)
    assert copy.count_states() == {"trained": 1, "dropped:zero_advantage": 1, "drawn": 4}
    assert copy.totals() == Totals(8, 80, {"zero_advantage": 4})
    assert copy.algorithm_states() == {"env": learned("[1]")}
    assert copy.clock().seconds == 1.0
    assert copy.next_credit() == 1
    assert journal.last_step() == 3
    assert journal.algorithm_states() == {"env": learned("[3]")}


def test_a_state_committed_between_two_steps_is_the_newest(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0), shipped(0), state="1"), shipped=1)
    journal.commit(entries(draws(1), dropped(1, "zero_advantage"), state="2"))
    assert journal.algorithm_states() == {"env": learned("2")}
    journal.rewind(1)
    assert journal.algorithm_states() == {"env": learned("1")}
    assert journal.open_draws() == draws(1)


def test_rewards_come_back_in_the_order_of_credit(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    late, early = (Outcome(i, "", 1, 1, {}, credit, [("a", float(i))]) for i, credit in ((0, 1), (1, 0)))
    journal.commit(entries(draws(0, 1), late, early), shipped=1)
    assert list(journal.credits()) == [(1, "env", [("a", 1.0)]), (0, "env", [("a", 0.0)])]


def test_results_are_in_the_order_of_credit_and_tell_failures_from_what_was_given_up(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    late, early = (Outcome(i, "", 1, 1, {}, credit, [("a", float(i)), ("b", 0.5)]) for i, credit in ((0, 1), (1, 0)))
    partly = Outcome(4, "timeout", 2, 0, {"timeout": 1, "group_failed": 1})
    outcomes = [late, early, dropped(2, "timeout", rollouts=3), dropped(3, "on_policy"), partly]
    journal.commit(entries(draws(0, 1, 2, 3, 4, 5), *outcomes), shipped=1)
    results = [(result.draw, result.task_key, result.rewards, result.failed) for result in journal.results()]
    assert results == [
        (1, "key1", [1.0, 0.5], 0),
        (0, "key0", [0.0, 0.5], 0),
        (2, "key2", [], 3),
        (3, "key3", [], 0),
        (4, "key4", [], 0),
    ]


def test_a_step_that_was_begun_can_be_opened_again_and_the_clock_goes_on(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0), shipped(0), state="1", clock=Clock(1.0)), shipped=1)
    journal.commit(entries(draws(1, 2), dropped(1, "gated"), state="2", clock=Clock(5.0, 7)))
    journal.rewind(journal.last_step(), keep_clock=True)
    assert journal.open_draws() == draws(1, 2)
    assert journal.algorithm_states() == {"env": learned("1")}
    assert journal.totals() == Totals(4, 40, {})
    assert journal.clock() == Clock(5.0, 7)


def test_drops_are_counted_by_environment(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    drawn = [Draw(0, "a", "x", 0), Draw(1, "b", "y", 0), Draw(2, "a", "z", 1)]
    outcomes = [dropped(0, "timeout", 2), dropped(1, "timeout", 3), dropped(2, "gated", 4)]
    journal.commit(entries(drawn, *outcomes))
    assert journal.drops_per_env() == {"a": {"timeout": 2, "gated": 4}, "b": {"timeout": 3}}


def test_a_commit_that_would_leave_out_a_draw_is_refused(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0, 1)))
    with pytest.raises(RuntimeError, match=r"\b2\b.*\[3\]"):
        journal.commit(entries(draws(3)))
    assert journal.drawn_per_env() == {"env": 2}


def test_a_local_disk_is_no_network_file_system(tmp_path: Path):
    assert network_file_system(tmp_path) is None


def test_what_is_still_open_at_the_end_of_a_run_is_dropped_with_a_reason(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0, 1), shipped(0)), shipped=1)
    journal.drop_open("max_steps")
    assert journal.count_states() == {"shipped": 1, "dropped:max_steps": 1}


@pytest.mark.parametrize("read_only", [True, False])
def test_a_damaged_journal_is_refused_with_what_to_do(read_only: bool, tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    Journal(path).close()
    os.truncate(path, 4096)
    with refused(BadInput, file=path):
        Journal(path, read_only=read_only)


@pytest.mark.parametrize(("version", "says"), [(1, "written by an older Headrace"), (99, "newer version")])
def test_a_journal_of_another_time_is_refused(version: int, says: str, tmp_path: Path):
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        db.execute(f"PRAGMA user_version={version}")
    with pytest.raises((Failure, ValueError), match=says):
        Journal(tmp_path / "journal.sqlite")


def test_every_start_of_a_run_has_a_number_of_its_own_whatever_is_rewound(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    first = Journal(path)
    assert first.start() == 1
    first.commit(entries(draws(0), shipped(0)), shipped=1)
    second = Journal(path)
    assert second.start() == 2
    second.rewind(0)
    assert Journal(path).start() == 3
    fork(path, tmp_path / "fork" / "journal.sqlite", step=0)
    assert Journal(tmp_path / "fork" / "journal.sqlite").start() == 4


def test_marking_a_batch_as_trained_writes_one_row_and_changes_no_draw(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    journal.commit(entries(draws(0, 1), shipped(0), shipped(1)), shipped=1)
    before = rows(tmp_path, "SELECT * FROM draws")
    journal.mark_trained(1)
    journal.mark_trained(0)  # an older checkpoint takes nothing back
    assert rows(tmp_path, "SELECT * FROM draws") == before
    assert rows(tmp_path, "SELECT id, step FROM covered") == [(1, 1)]
    assert journal.count_states() == {"trained": 2}
    journal.rewind(0)
    assert journal.covered_step() == 0


def test_every_row_has_the_epoch_of_its_writer_and_a_checksum(tmp_path: Path):
    first = Journal(tmp_path / "journal.sqlite")
    first.start()
    first.exchange_data("train", "env", Fingerprint(3, "digest"))
    first.commit(entries(draws(0, 1, 2), shipped(0, timeout=1), state="1", clock=Clock(1, 2)), shipped=1)
    second = Journal(tmp_path / "journal.sqlite")
    second.start()
    second.commit(entries(draws(3), dropped(1, "gated"), state="2", clock=Clock(2.5)))
    second.mark_trained(1)
    second.drop_open("max_steps")
    assert rows(tmp_path, "SELECT id, epoch FROM draws") == [(0, 1), (1, 2), (2, 2), (3, 2)]
    assert rows(tmp_path, "SELECT number, epoch FROM starts") == [(1, 1), (2, 2)]
    assert second.find_damage() == []
    second.rewind(second.last_step(), keep_clock=True)
    assert second.find_damage() == []
    for table in ("draws", "drops", "steps", "algorithms", "clock", "data", "starts", "covered"):
        assert rows(tmp_path, f"SELECT COUNT(*) FROM {table} WHERE checksum IS NULL OR epoch IS NULL") == [(0,)]


def test_files_are_recorded_with_their_commit_and_taken_back_with_it(tmp_path: Path):
    journal = Journal(tmp_path / "journal.sqlite")
    config, one, two = (FileRecord(name, 7, f"digest of {name}") for name in ("config.toml", "one", "two"))
    journal.record_files([config])
    journal.commit(entries(draws(0), shipped(0)), shipped=1, files=[one])
    journal.commit(entries(draws(1)), files=[two])
    assert journal.files() == {"config.toml": config, "one": one, "two": two}
    journal.commit(entries(draws(2)), deleted=["one"])
    assert journal.files().keys() == {"config.toml", "two"}
    journal.rewind(1)
    assert journal.files() == {"config.toml": config}
    fork(tmp_path / "journal.sqlite", tmp_path / "fork.sqlite", step=1)
    assert Journal(tmp_path / "fork.sqlite").files() == {}


def test_a_journal_of_the_previous_schema_is_read_as_it_is_and_migrated_when_it_is_written(tmp_path: Path):
    path = tmp_path / "journal.sqlite"
    shutil.copy(RECORDED, path)
    old = Journal(path, read_only=True)
    states, credits, totals = old.count_states(), list(old.credits()), old.totals()
    assert not old.has_checksums and set(states) & {"trained"}
    assert rows(tmp_path, "PRAGMA user_version") == [(4,)]
    journal = Journal(path)
    assert (journal.count_states(), list(journal.credits()), journal.totals()) == (states, credits, totals)
    assert journal.find_damage() == []
    again = Journal(path, read_only=True)
    assert again.has_checksums and again.count_states() == states


def test_a_flipped_bit_in_the_write_ahead_log_of_a_killed_run_is_refused_with_the_file(tmp_path: Path):
    path = write_and_kill(tmp_path / "run", tmp_path / "killed")
    damaged = tmp_path / "killed" / "journal.sqlite-wal"
    content = bytearray(damaged.read_bytes())
    content[content.index(b"key1")] ^= 1
    damaged.write_bytes(content)
    for read_only in (True, False):
        with refused(BadInput, file=damaged):
            Journal(path, read_only=read_only)


def test_a_transaction_that_was_being_written_at_a_kill_is_no_damage(tmp_path: Path):
    path = write_and_kill(tmp_path / "run", tmp_path / "killed")
    log = tmp_path / "killed" / "journal.sqlite-wal"
    with open(log, "r+b") as file:
        file.truncate(log.stat().st_size - 100)
    journal = Journal(path)
    assert journal.find_damage() == []
    assert (journal.last_step(), journal.covered_step()) == (2, 0)


def test_a_deleted_write_ahead_log_that_had_the_tables_is_reported(tmp_path: Path):
    path = write_and_kill(tmp_path / "run", tmp_path / "killed", checkpointed=False)
    (tmp_path / "killed" / "journal.sqlite-wal").unlink()
    with refused(BadInput, file=path):
        Journal(path, read_only=True)


def test_reading_a_closed_journal_leaves_no_files_beside_it_and_needs_no_writable_directory(tmp_path: Path):
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.commit(entries(draws(0)))
    tmp_path.chmod(0o555)
    try:
        with closing(Journal(tmp_path / "journal.sqlite", read_only=True)) as journal:
            assert journal.open_draws() == draws(0)
    finally:
        tmp_path.chmod(0o755)
    assert [path.name for path in tmp_path.iterdir()] == ["journal.sqlite"]


@pytest.mark.parametrize("flips", [20, pytest.param(300, marks=pytest.mark.full)])
def test_a_flipped_bit_is_found_or_changes_nothing_that_can_be_read(flips: int, tmp_path: Path):
    path, seed = tmp_path / "journal.sqlite", random.randrange(2**32)
    print(f"seed {seed}")
    fill(path, random.Random(1), steps=20)
    whole, dump = path.read_bytes(), dump_of(path)
    rng = random.Random(seed)
    for _ in range(flips):
        place, bit = rng.randrange(len(whole)), rng.randrange(8)
        content = bytearray(whole)
        content[place] ^= 1 << bit
        path.write_bytes(content)
        try:
            with closing(Journal(path, read_only=True)) as journal:
                found = journal.find_damage() != []
        except (BadInput, SchemaError):
            found = True
        assert found or dump_of(path) == dump, f"bit {bit} of byte {place}, seed {seed}"


@pytest.mark.parametrize("flips", [20, pytest.param(300, marks=pytest.mark.full)])
def test_a_flipped_bit_in_the_files_of_a_killed_run_is_found_or_undoes_at_most_the_last_commit(
    flips: int, tmp_path: Path
):
    """A commit whose last page was being written at a kill looks the same, so that one alone cannot be refused."""
    fill(tmp_path / "run" / "journal.sqlite", random.Random(1), steps=20)
    writer, seed = Journal(tmp_path / "run" / "journal.sqlite"), random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for step, draw in enumerate(writer.open_draws()[:6], start=writer.last_step() + 1):
        before = list(writer._db.iterdump())
        writer.commit(entries([], shipped(draw.id)), shipped=step)
    dumps = [before, list(writer._db.iterdump())]
    files = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    writer.close()
    for number in range(flips):
        name = rng.choice(["journal.sqlite", "journal.sqlite-wal", "journal.sqlite-wal", "journal.sqlite-shm"])
        place, bit = rng.randrange(len(files[name])), rng.randrange(8)
        directory = tmp_path / str(number)
        directory.mkdir()
        for other, content in files.items():
            damaged = bytearray(content)
            damaged[place if other == name else 0] ^= (other == name) << bit
            (directory / other).write_bytes(damaged)
        try:
            with closing(Journal(directory / "journal.sqlite", read_only=True)) as journal:
                found = journal.find_damage() != []
        except (BadInput, SchemaError):
            found = True
        is_in_last_frame = name.endswith("-wal") and place >= len(files[name]) - 24 - 4096
        allowed = dumps if is_in_last_frame else dumps[1:]
        assert found or dump_of(directory / "journal.sqlite") in allowed, f"bit {bit} of byte {place} of {name}"


def fill(path: Path, rng: random.Random, steps: int) -> None:
    """Write a run with drops, rewinds, states and recorded files; the closed journal is one file."""
    with closing(Journal(path)) as journal:
        journal.start()
        totals = Totals()
        for step in range(1, steps + 1):
            drawn = draws(*range(6 * step - 6, 6 * step))
            kept = [shipped(d.id, rng.randint(1, 8), rng.randint(1, 10**6), timeout=1) for d in drawn[:4]]
            lost = [dropped(d.id, rng.choice(["gated", "zero_advantage"])) for d in drawn[4:5]]
            for outcome in (*kept, *lost):
                totals.add(outcome)
            state = {"env": learned(f'{{"baseline":{rng.random()}}}')}
            record = Entries(drawn, [*kept, *lost], totals.copy(), state, Clock(step + rng.random(), step))
            journal.commit(record, shipped=step, files=[FileRecord(f"step-{step}", 7, f"{rng.random()}")])
        journal.rewind(steps - 2)
        journal.mark_trained(steps - 4)


def dump_of(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        return list(db.iterdump())


def write_and_kill(run: Path, copy: Path, *, checkpointed: bool = True) -> Path:
    """Copy the files of a journal whose writer has not closed it, as a kill leaves them; return its path there."""
    path = run / "journal.sqlite"
    if checkpointed:
        with closing(Journal(path)) as journal:
            journal.commit(entries(draws(0, 1), shipped(0)), shipped=1)
    writer = Journal(path)
    if not checkpointed:
        writer.commit(entries(draws(0, 1), shipped(0)), shipped=1)
    writer.commit(entries([], shipped(1)), shipped=2)
    writer.mark_trained(1)
    shutil.copytree(run, copy)
    if not checkpointed:
        os.truncate(copy / "journal.sqlite", 0)  # as before the first checkpoint of the log
    writer.close()
    return copy / "journal.sqlite"


def rows(directory: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(directory / "journal.sqlite")) as db:
        return db.execute(query).fetchall()
