"""The command as a user starts it: a real process, a real socket, live updates."""

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

from headrace.observe.metrics import MetricsLog
from tests.tools.view.client import RECORDED

START_TIMEOUT_S = 60


def test_a_browser_gets_the_page_and_what_a_live_run_appends(tmp_path: Path):
    shutil.copytree(RECORDED / "rl", tmp_path / "rl")
    command = [sys.executable, "-m", "headrace", "view", str(tmp_path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = urlsplit(process.stdout.readline().strip())
            assert url.hostname == "127.0.0.1"
            connection = http.client.HTTPConnection(url.netloc, timeout=START_TIMEOUT_S)
            connection.request("GET", "/api/runs")
            assert connection.getresponse().read() and connection.sock is not None
            connection.request("GET", f"/?{url.query}")
            exchanged = connection.getresponse()
            exchanged.read()
            assert exchanged.status == 303
            cookie = {"Cookie": exchanged.getheader("set-cookie", "").partition(";")[0]}
            connection.request("GET", "/api/runs", headers=cookie)
            [run] = json.loads(connection.getresponse().read())["runs"]
            connection.request("GET", f"/api/runs/{run['id']}/events", headers=cookie)
            events = connection.getresponse()
            assert events.getheader("content-type", "").startswith("text/event-stream")
            while events.readline() != b"event: status\n":
                pass
            MetricsLog(tmp_path / "rl" / "metrics.jsonl", "trainer").log(5, {"loss": 0.125})
            while events.readline() != b"event: metrics\n":
                pass
            data = re.fullmatch(rb"data: (.*)\n", events.readline())
            assert data is not None
            assert [record["loss"] for record in json.loads(data[1])["records"]] == [0.125]
            connection.close()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=START_TIMEOUT_S)
    assert sorted(path.name for path in (tmp_path / "rl").iterdir()) == sorted(
        path.name for path in (RECORDED / "rl").iterdir()
    )
