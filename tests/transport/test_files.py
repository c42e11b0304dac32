"""Files that are whole or absent."""

import errno
import os
from pathlib import Path

import pytest

from headrace.transport.files import write_atomically


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_replaces_the_old_content(tmp_path: Path):
    path = tmp_path / "new" / "directory" / "state.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["state.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
):
    path = tmp_path / "state.json"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, step, full_disk)
    with pytest.raises(OSError, match="No space left") as failure:
        write_atomically(path, b"new and longer")
    assert failure.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_write_that_fails_the_first_time_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "state.json", b"new")
    assert os.listdir(tmp_path) == []


def test_the_content_is_on_disk_before_the_name_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    real_fsync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("fsync"), real_fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), real_replace(*paths)))
    write_atomically(tmp_path / "state.json", b"content")
    assert calls == ["fsync", "replace", "fsync"]  # the file, its new name, the directory that holds the name


def test_writers_in_two_processes_do_not_share_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drafts = []
    real_replace = os.replace
    monkeypatch.setattr(os, "replace", lambda draft, path: (drafts.append(draft), real_replace(draft, path)))
    for process in (11, 12):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        write_atomically(tmp_path / "state.json", b"content")
    assert len(set(drafts)) == 2
