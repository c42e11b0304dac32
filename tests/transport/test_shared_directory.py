import os
from pathlib import Path

import pytest

from headrace.transport.shared_directory import Canary, UnsuitableDirectory


def test_hosts_that_share_a_directory_see_each_others_files(tmp_path: Path):
    canary = Canary(tmp_path, ".canary-1")
    canary.create()
    assert canary.check("host", timeout_s=0.0) > 0
    assert canary.confirm("host", timeout_s=0.0)
    assert sorted(path.name for path in canary.folder.iterdir()) == ["driver", "host"]
    canary.delete()
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_sees_another_directory_is_found_on_both_sides(tmp_path: Path):
    mine, other = Canary(tmp_path / "mine", ".canary-1"), Canary(tmp_path / "other", ".canary-1")
    mine.create()
    with pytest.raises(UnsuitableDirectory, match=str(other.folder.parent)):
        other.check("host", timeout_s=0.0)
    other.create()
    other.check("host", timeout_s=0.0)
    assert not mine.confirm("host", timeout_s=0.0)


def test_what_a_killed_driver_has_left_is_deleted_by_the_next_one(tmp_path: Path):
    for name in (".canary-1", ".canary-2"):
        Canary(tmp_path, name).create()
    assert [path.name for path in tmp_path.iterdir()] == [".canary-2"]


def test_the_file_of_an_earlier_driver_is_not_taken_for_this_one(tmp_path: Path):
    canary = Canary(tmp_path, ".canary-2")
    canary.folder.mkdir()
    (canary.folder / "driver").write_text(".canary-1")
    with pytest.raises(UnsuitableDirectory):
        canary.check("host", timeout_s=0.0)


def test_a_file_system_that_ignores_exclusive_creation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    canary = Canary(tmp_path, ".canary-1")
    canary.create()
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *more: opened(path, flags & ~os.O_EXCL, *more))
    with pytest.raises(UnsuitableDirectory, match="exclusive creation"):
        canary.check("host", timeout_s=0.0)


def test_a_file_system_whose_rename_keeps_the_old_target_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    canary = Canary(tmp_path, ".canary-1")
    canary.create()
    replaced = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: None if Path(new).exists() else replaced(old, new))
    with pytest.raises(UnsuitableDirectory, match="rename"):
        canary.check("host", timeout_s=0.0)


def test_a_file_system_without_fsync_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    canary = Canary(tmp_path, ".canary-1")
    canary.create()

    def fail(descriptor: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UnsuitableDirectory, match="Operation not supported"):
        canary.check("host", timeout_s=0.0)
