from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.errors import FENCED, BadInput, Fenced
from headrace.transport.batches import BatchStore
from headrace.transport.epochs import (
    DRAFTS,
    EPOCHS,
    LAUNCHER_VAR,
    LEASE_S,
    Epoch,
    Held,
    Holder,
    Lease,
    Observer,
    Verdict,
    hold_epoch,
    is_held,
    list_epochs,
    newest_lease,
    take_epoch,
    this_process,
)
from headrace.transport.files import discard, use_drafts, write_atomically, write_directory
from tests.refusals import refused

ELSEWHERE = Holder("elsewhere", "boot", "pids", 1, 1, "nonce")
"""A process on another host, of which only renewals say that it lives."""


@pytest.fixture
def epochs() -> Iterator[list[Epoch]]:
    taken: list[Epoch] = []
    yield taken
    for epoch in taken:
        epoch.release()


@given(st.lists(st.tuples(st.floats(0.01, 5), st.booleans()), min_size=1, max_size=40), st.floats(-1e9, 1e9))
def test_a_lease_expires_on_the_clock_of_the_observer_alone(looks: list[tuple[float, bool]], clock: float):
    """Renewals come at any pace of any clock: the first one that is seen means held, else 15 s of the observer."""
    observer, lease, began = Observer(lambda _: False), Lease(ELSEWHERE), clock
    assert observer.judge(1, lease, clock) is Verdict.UNKNOWN
    for seconds, renewed in looks:
        clock += seconds
        lease.counter += renewed
        verdict = observer.judge(1, lease, clock)
        if lease.counter:
            assert verdict is Verdict.HELD
            break
        assert verdict is (Verdict.FREE if clock - began > LEASE_S else Verdict.UNKNOWN)


def test_a_process_of_this_host_that_is_gone_has_no_lease(tmp_path: Path):
    code = (
        "import os, sys; from pathlib import Path; from headrace.transport.epochs import take_epoch; "
        "take_epoch(Path(sys.argv[1]), 'trainer'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    lease = newest_lease(tmp_path, "trainer")
    assert lease is not None and not lease.released
    assert not is_held(tmp_path, "trainer")
    with hold_epoch(tmp_path, "trainer") as epoch:  # without waiting
        assert epoch.number == 2


def test_a_living_holder_is_not_replaced(tmp_path: Path, epochs: list[Epoch]):
    epochs.append(take_epoch(tmp_path, "orchestrator"))
    with pytest.raises(Held) as held:
        take_epoch(tmp_path, "orchestrator")
    assert held.value.holder is not None and held.value.holder.pid == os.getpid()
    assert is_held(tmp_path, "orchestrator") and not is_held(tmp_path, "trainer")


def test_a_holder_on_another_host_is_replaced_after_its_lease_on_the_clock_of_the_observer(
    tmp_path: Path, epochs: list[Epoch]
):
    directory = tmp_path / EPOCHS / "trainer"
    directory.mkdir(parents=True)
    (directory / "7.json").write_bytes(b"")  # created, and never written
    now, waits = [5.0], []
    epochs.append(
        take_epoch(
            tmp_path, "trainer", on_wait=waits.append, clock=lambda: now[0], sleep=lambda s: now.append(now.pop() + s)
        )
    )
    assert (epochs[0].number, waits) == (8, [None])
    assert LEASE_S < now[0] - 5 < LEASE_S + 1


def test_a_launched_process_replaces_its_predecessor_at_once(
    tmp_path: Path, epochs: list[Epoch], monkeypatch: pytest.MonkeyPatch
):
    ended = threading.Event()
    epochs.append(take_epoch(tmp_path, "trainer", on_fenced=lambda _: ended.set()))
    epochs.append(take_epoch(tmp_path, "launcher"))
    monkeypatch.setenv(LAUNCHER_VAR, "1")
    with hold_epoch(tmp_path, "trainer") as epoch:
        assert epoch.number == 2
        assert ended.wait(10)


def test_a_process_of_a_replaced_launcher_does_not_start(
    tmp_path: Path, epochs: list[Epoch], monkeypatch: pytest.MonkeyPatch
):
    take_epoch(tmp_path, "launcher").release()
    epochs.append(take_epoch(tmp_path, "launcher"))
    monkeypatch.setenv(LAUNCHER_VAR, "1")
    with refused(BadInput, key="RUN", value=tmp_path), hold_epoch(tmp_path, "trainer"):
        pass


def test_of_many_processes_that_take_an_epoch_at_once_each_gets_its_own(tmp_path: Path, epochs: list[Epoch]):
    def take() -> None:
        epochs.append(take_epoch(tmp_path, "trainer", take_over=True, on_fenced=lambda _: None))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(epoch.number for epoch in epochs) == list(range(1, 9))
    assert sorted(list_epochs(tmp_path / EPOCHS / "trainer")) == list(range(1, 9))
    assert [path.name.split("-")[1] for path in (tmp_path / DRAFTS).iterdir()] == ["8"]


def test_a_batch_that_was_prepared_by_an_older_epoch_is_announced_by_the_newer_one_alone(tmp_path: Path):
    old, new = BatchStore(tmp_path), BatchStore(tmp_path)
    for step in (1, 2):
        (tmp_path / f".step-{step:08d}.prepared").write_bytes(b"")
    new.adopt(2)
    with pytest.raises(FileNotFoundError):
        old.announce(1)
    assert new.is_committed(1) and not new.exists(1)
    new.recover(1)
    assert new.steps() == [1] and not list(tmp_path.glob("*.prepared"))


@pytest.mark.parametrize("replaces", [False, True])
def test_a_process_that_is_replaced_in_the_middle_of_a_write_changes_nothing(
    replaces: bool, tmp_path: Path, epochs: list[Epoch]
):
    final = tmp_path / "checkpoints" / "step-00000001"
    if replaces:
        write_directory(final, lambda draft: (draft / "of").write_text("the first"))
    epochs.append(take_epoch(tmp_path, "trainer", on_fenced=lambda _: None))

    def fill(draft: Path) -> None:
        (draft / "of").write_text("the old one")
        epochs.append(take_epoch(tmp_path, "trainer", take_over=True))

    with use_drafts(tmp_path, epochs[0].drafts), pytest.raises((Fenced, FileNotFoundError)):
        write_directory(final, fill)
    assert [path.read_text() for path in final.glob("*")] == ["the first"] * replaces
    with use_drafts(tmp_path, epochs[1].drafts):
        write_directory(final, lambda draft: (draft / "of").write_text("the new one"))
    assert (final / "of").read_text() == "the new one"


def test_a_fenced_process_says_so_and_exits(tmp_path: Path, epochs: list[Epoch]):
    code = (
        "import sys, time; from pathlib import Path; from headrace.transport.epochs import hold_epoch\n"
        "with hold_epoch(Path(sys.argv[1]), 'trainer'): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGSTOP)
    epochs.append(take_epoch(tmp_path, "trainer", take_over=True))
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == FENCED
    assert f"process {os.getpid()} on {this_process().host}" in errors


class PausedProcesses(RuleBasedStateMachine):
    """Processes on hosts with skewed clocks take the role, pause and continue at any moment, and write."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.root = Path(self.stack.enter_context(TemporaryDirectory()))
        self.taken: list[Epoch] = []
        self.written: dict[str, int] = {}
        """The epoch that last wrote each name, as a reader may rely on it."""

    @rule()
    def take_over(self) -> None:
        epoch = take_epoch(self.root, "role", take_over=True, on_fenced=lambda _: None)
        self.stack.callback(epoch.release)
        self.taken.append(epoch)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), name=st.sampled_from("ab"), how=st.sampled_from(["file", "directory", "delete"]))
    def write(self, data: st.DataObject, name: str, how: str) -> None:
        """Any process, paused for however long, goes on in the middle of a write."""
        epoch = data.draw(st.sampled_from(self.taken))
        path = self.root / "folder" / f"{how}-{name}"
        with use_drafts(self.root, epoch.drafts):
            try:
                if how == "file":
                    write_atomically(path, str(epoch.number).encode())
                elif how == "directory":
                    write_directory(path, lambda draft: (draft / "epoch").write_text(str(epoch.number)))
                elif (self.root / "folder" / f"file-{name}").exists():
                    path = self.root / "folder" / f"file-{name}"
                    discard(path)
                else:
                    return
            except Fenced:
                assert epoch is not self.taken[-1]
                return
        assert epoch is self.taken[-1]
        self.written[path.name] = 0 if how == "delete" else epoch.number

    @invariant()
    def only_the_newest_epoch_has_changed_what_is_read(self) -> None:
        for name, epoch in self.written.items():
            path = self.root / "folder" / name
            content = path / "epoch" if path.is_dir() else path
            assert (int(content.read_text()) if content.exists() else 0) == epoch

    def teardown(self) -> None:
        self.stack.close()


TestPausedProcesses = PausedProcesses.TestCase
TestPausedProcesses.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)
