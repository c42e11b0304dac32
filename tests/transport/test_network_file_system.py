"""Two mounts of one folder are two hosts that cache names for 30 s and have neither locks nor shared memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from headrace.errors import Fenced
from headrace.launch.run_directory import hold, in_use
from headrace.rollout.version import Version
from headrace.transport.epochs import Held, hold_epoch, take_epoch
from headrace.transport.files import use_drafts, write_atomically
from headrace.transport.journal import Journal, take_over
from headrace.transport.journal_entries import Draw, Entries, Outcome, Totals
from headrace.transport.journal_files import network_file_system
from headrace.transport.run_dir import RunDir
from headrace.transport.shared_directory import PREFIX, Canary
from tests.transport import nfs
from tests.transport.network_mount import missing, mounted

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(scope="module", params=["folder", pytest.param("nfs", marks=pytest.mark.full)])
def mounts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[Path, Path]]:
    base = tmp_path_factory.mktemp("mounts")
    with ExitStack() as stack:
        source: Path | str = base / "folder"
        if request.param == "nfs":
            if reason := nfs.missing():
                pytest.skip(reason)
            source = stack.enter_context(nfs.exported(base / "folder", base / "server"))
        for point in (base / "here", base / "there"):
            stack.enter_context(mounted(source, point))
        yield base / "here", base / "there"


@pytest.fixture
def hosts(mounts: tuple[Path, Path], request: pytest.FixtureRequest) -> tuple[RunDir, RunDir]:
    """One run, as two hosts see it."""
    here, there = (RunDir(mount / request.node.name) for mount in mounts)
    here.root.mkdir()
    for host in (here, there):
        host.create_directories()
    return here, there


def entries(*draws: int) -> Entries:
    outcomes = [Outcome(draw, rollouts=1, tokens=3) for draw in draws]
    return Entries([Draw(draw, "env", f"key{draw}", draw) for draw in draws], outcomes, Totals(len(draws)))


def test_a_host_remembers_that_a_name_did_not_exist(hosts: tuple[RunDir, RunDir]):
    """Without this the other tests would prove nothing."""
    here, there = hosts
    assert network_file_system(here.root) == network_file_system(there.root) == "fuse"
    assert not (there.root / "name").exists()
    (here.root / "name").touch()
    assert not (there.root / "name").exists()
    assert "name" in [path.name for path in there.root.iterdir()]


def test_the_check_of_a_joining_host_passes(hosts: tuple[RunDir, RunDir]):
    driver, host = (Canary(run.root, f"{PREFIX}1") for run in hosts)
    driver.create()
    assert host.check("nonce") > 0 and driver.confirm("nonce")


def test_what_a_host_waits_for_is_found_at_once(hosts: tuple[RunDir, RunDir]):
    here, there = hosts
    assert not there.batches.exists(1) and there.weights.acknowledged() is None and there.weights.latest() is None
    (here.batches.directory / ".step-00000001.prepared").touch()
    here.batches.announce(1)
    here.weights.publish(Version(0, 1), lambda draft: (draft / "model.safetensors").touch())
    here.weights.acknowledge(Version(0, 1))
    assert there.batches.exists(1)
    assert there.weights.acknowledged() == there.weights.latest() == Version(0, 1)
    here.weights.acknowledge(Version(2, 30))
    assert there.weights.acknowledged() == Version(2, 30)


def test_hosts_without_locks_keep_each_other_out_by_leases(hosts: tuple[RunDir, RunDir]):
    here, there = hosts
    with hold(here.root):
        assert in_use(there.root)
        with pytest.raises(Held):
            take_epoch(there.root, "launcher")
    assert not in_use(there.root)
    with hold_epoch(there.root, "trainer") as first:
        pass
    with hold_epoch(here.root, "trainer") as second:
        assert (first.number, second.number) == (1, 2)


def test_a_host_that_was_replaced_cannot_write(hosts: tuple[RunDir, RunDir]):
    here, there = hosts
    path = Path("checkpoints") / "step-00000001"
    fenced = threading.Event()
    old = take_epoch(here.root, "trainer", on_fenced=lambda _: fenced.set())
    with use_drafts(here.root, old.drafts):
        write_atomically(here.root / path, b"old")
    new = take_epoch(there.root, "trainer", take_over=True)
    with use_drafts(here.root, old.drafts), pytest.raises((Fenced, FileNotFoundError)):
        write_atomically(here.root / path, b"old again")
    with use_drafts(there.root, new.drafts):
        write_atomically(there.root / path, b"newest")
    assert (here.root / path).read_bytes() == b"newest"
    assert fenced.wait(10)
    old.release()
    new.release()


def test_the_journal_is_read_on_another_host_while_it_is_written(hosts: tuple[RunDir, RunDir]):
    here, there = hosts
    with closing(take_over(here.root, 1)) as writer:
        writer.start()
        for step in range(1, 8):
            writer.commit(entries(2 * step - 2, 2 * step - 1), shipped=step)
            with closing(Journal(there.journal, read_only=True)) as reader:
                assert reader.last_step() == step
                assert reader.find_damage() == []
        assert not list(here.root.glob("*-shm"))


def test_the_journal_of_a_lost_host_is_continued_on_another_and_the_old_one_is_not_read_any_more(
    hosts: tuple[RunDir, RunDir],
):
    here, there = hosts
    lost = take_over(here.root, 1)
    lost.start()
    lost.commit(entries(0, 1), shipped=1)  # in its log; the host stops here
    with closing(take_over(there.root, 2)) as journal:
        assert journal.last_step() == 1
        journal.start()
        lost.commit(entries(2), shipped=2)  # the host is back
        journal.commit(entries(2, 3), shipped=2)
        with closing(Journal(here.journal, read_only=True)) as reader:
            assert [draw.id for draw, *_ in reader.draws()] == [0, 1, 2, 3]
    lost.close()
    with closing(take_over(here.root, 3)) as journal:
        assert journal.last_step() == 2 and journal.find_damage() == []
    assert sorted(path.name for path in here.root.glob("journal-*.sqlite")) == ["journal-2.sqlite", "journal-3.sqlite"]


def test_a_copy_of_a_journal_is_whole_however_fast_it_is_written(hosts: tuple[RunDir, RunDir]):
    """The log begins again every few commits: a copy is then of two moments, and is made again."""
    here, there = hosts
    done = threading.Event()

    def write() -> None:
        with closing(take_over(here.root, 1)) as writer:
            writer.start()
            writer._db.execute("PRAGMA wal_autocheckpoint=4")
            for step in range(1, 150):
                writer.commit(entries(step - 1), shipped=step)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = [0]
    while not done.is_set():
        try:
            with closing(Journal(there.journal, read_only=True)) as reader:
                assert reader.find_damage() == []
                seen.append(reader.last_step())
        except FileNotFoundError:
            assert seen == [0]
    thread.join()
    assert seen == sorted(seen)
