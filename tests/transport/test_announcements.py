from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.launch.driver import Driver
from headrace.transport.announcements import DRIVER_VAR, KEY_VAR, announce, announcements, list_names
from headrace.transport.run_dir import RunDir


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver(RunDir(tmp_path), is_alone=True)
    for name, value in driver.env.items():
        monkeypatch.setenv(name, value)
    yield driver
    if not driver.is_closed:
        driver.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_without_a_driver_names_are_those_of_the_listing(tmp_path: Path):
    with announcements(tmp_path):
        assert list_names(tmp_path / "none") == []
        (tmp_path / "b").touch()
        (tmp_path / "a").touch()
        announce(tmp_path / "c")
        assert list_names(tmp_path) == ["a", "b"]


def test_an_announced_name_is_found_before_a_listing_shows_it(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "batches"
    folder.mkdir()
    with announcements(tmp_path):
        monkeypatch.setattr("os.listdir", lambda _: ["stale"])  # cached by the client of a network file system
        assert list_names(folder) == ["stale"]
        (folder / "new").touch()
        announce(folder / "new")
        announce(folder / "deleted since")
        announce(folder / "stale", withdrawn=True)
        wait_until(lambda: list_names(folder) == ["new"])


def test_announcements_from_before_the_start_of_a_process_reach_it(driver: Driver, tmp_path: Path):
    (tmp_path / "a").touch()
    with announcements(tmp_path):
        announce(tmp_path / "a", withdrawn=True)
        wait_until(lambda: "a" not in list_names(tmp_path))
    assert "a" in list_names(tmp_path)
    with announcements(tmp_path):
        wait_until(lambda: "a" not in list_names(tmp_path))


def test_a_driver_that_is_gone_neither_delays_nor_fails_the_caller(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    driver.close()
    with announcements(tmp_path):
        announce(tmp_path / "a")
        (tmp_path / "a").touch()
        assert "a" in list_names(tmp_path)
    monkeypatch.setenv(DRIVER_VAR, "http://127.0.0.1:9")
    monkeypatch.setenv(KEY_VAR, "wrong")
    with announcements(tmp_path):
        announce(tmp_path / "a")
        assert "a" in list_names(tmp_path)
