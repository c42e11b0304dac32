"""A sign of life for outside monitors: a file, and calls to a URL that can neither stall nor fail the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.launch.heartbeat import Heartbeat
from tests.observe.test_status import Clocks


@contextmanager
def listener() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that keeps what is posted to it."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/ping", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_file_says_how_far_the_run_is_and_how_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    heartbeat = Heartbeat(path)
    heartbeat.update(step=3, moves=7, problem="every reward was 0")
    first = json.loads(path.read_text())
    assert (first["state"], first["step"], first["problem"]) == ("running", 3, "every reward was 0")
    assert first["last_progress"] == first["time"]
    heartbeat.update(step=3, moves=7, problem="")
    heartbeat.close("finished")
    assert json.loads(path.read_text())["state"] == "finished"


@pytest.mark.parametrize("jump_s", [172_800.0, -172_800.0])
def test_setting_the_wall_clock_neither_delays_the_file_nor_changes_the_time_since_the_last_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    path, clocks = tmp_path / "heartbeat.json", Clocks(monkeypatch)
    heartbeat = Heartbeat(path)
    heartbeat.update(1, 1, "")
    clocks.wall += jump_s
    for seconds in (6, 12):
        clocks.advance(6.0)
        heartbeat.update(1, 1, "")
        written = json.loads(path.read_text())
        assert written["time"] == clocks.wall
        assert written["time"] - written["last_progress"] == pytest.approx(seconds)


@pytest.mark.parametrize(("state", "posts"), [("finished", ["running", "finished"]), ("failed", ["running"])])
def test_the_url_hears_of_a_run_that_lives_or_ended_well(tmp_path: Path, state: str, posts: list[str]) -> None:
    with listener() as (url, received):
        heartbeat = Heartbeat(tmp_path / "heartbeat.json", url, interval=3600.0)
        heartbeat.update(1, 1, "")
        assert heartbeat.call is not None
        heartbeat.call.join()
        heartbeat.update(2, 2, "")  # not due
        heartbeat.close(state)
        heartbeat.call.join()
        assert [post["state"] for post in received] == posts


def test_a_url_that_does_not_answer_costs_a_warning_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat.json", "http://127.0.0.1:9/", interval=1e-9)
    for _ in range(2):
        heartbeat.update(1, 1, "")
        assert heartbeat.call is not None
        heartbeat.call.join()
    assert len(caplog.records) == 1
    assert (tmp_path / "heartbeat.json").exists()
