"""A driver in this process, and real node agents on this machine, each with a name of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.launch.driver import Driver
from headrace.launch.hosts.base import ProcessSpec
from headrace.launch.hosts.nodes import NodeHosts, NodeProcess
from headrace.transport.announcements import DRIVER_VAR, KEY_VAR
from headrace.transport.run_dir import RunDir

LIMIT_S = 60.0
"""For anything that takes a moment on an idle machine."""
LEASE_S = 3.0
FOREVER = (
    sys.executable,
    "-c",
    "import time; from headrace.launch.process import stop_with_launcher; stop_with_launcher(0.1); time.sleep(600)",
)


class NodeWorld:
    """`needed` hosts make a run of the directory `root`."""

    def __init__(self, root: Path, needed: int, *, timeout_s: float = LIMIT_S, **options: object) -> None:
        self.root, self.notices = root, list[str]()
        root.mkdir(exist_ok=True)
        self.driver = Driver(RunDir(root), is_alone=True, lease_s=LEASE_S, notify=self.notices.append, **options)  # type: ignore[arg-type]
        self.hosts = NodeHosts(self.driver, needed=needed, timeout_s=timeout_s)
        self.agents: dict[str, subprocess.Popen[str]] = {}

    def join(self, name: str, env: Mapping[str, str] | None = None, *options: str) -> subprocess.Popen[str]:
        """Start the agent of a host."""
        inherited = {name: value for name, value in os.environ.items() if name not in (DRIVER_VAR, KEY_VAR)}
        self.agents[name] = subprocess.Popen(
            [sys.executable, "-m", "headrace", "node", str(self.root), "--name", name, *options],
            env={**inherited, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.agents[name]

    def start(self, host: str, name: str = "process", argv: Sequence[str] = FOREVER, **env: str) -> NodeProcess:
        return self.hosts.start(ProcessSpec(name, argv, env, host=host), self.root / "logs" / f"{name}.log")

    def start_and_wait(self, host: str, name: str = "process") -> NodeProcess:
        process = self.start(host, name)
        wait_for(lambda: process.running and process.pid > 0)
        return process

    def close(self) -> None:
        if self.agents:
            self.hosts.close()
        self.driver.close()
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
            assert agent.stdout is not None
            agent.stdout.close()


def wait_for(condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        time.sleep(0.02)
