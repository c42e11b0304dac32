"""A Ray cluster on namespaced hosts: the head, which takes no work, on host 1, a node on each of the others."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from tests.cluster.hosts import REPOSITORY, HostSet, wait_for

PYTHON = Path(os.environ.get("HEADRACE_RAY_PYTHON", REPOSITORY / ".venv-ray" / "bin" / "python"))
"""An interpreter with Ray that also sees the packages of the tests."""
HEAD = 1
PORT = 6379
GPUS = 2
"""Of each node, pretended."""
STORE_BYTES = 80_000_000
STARTED = "Ray runtime started"
SETTINGS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_raylet_start_wait_time_s": "300",  # these machines may have few cores
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_niceness": "0",
}


def missing_for_ray() -> str | None:
    """Return why a Ray cluster cannot be started here, or None."""
    return None if PYTHON.exists() else f"{PYTHON} does not exist: make test-cluster installs Ray"


class RayCluster:
    """Runs until the end of the `with` statement; the hosts' own end also ends it."""

    def __init__(self, hosts: HostSet, directory: Path, nodes: int) -> None:
        self.hosts, self._directory = hosts, directory
        self._nodes = set(range(HEAD + 1, HEAD + 1 + nodes))
        """The hosts with a node that runs."""
        self.address = f"{hosts[HEAD].address}:{PORT}"

    def __enter__(self) -> RayCluster:
        self._directory.mkdir()
        head = ["--head", f"--port={PORT}", "--num-cpus=0", "--num-gpus=0", "--dashboard-host=0.0.0.0"]
        self._start(HEAD, *head)
        self._wait(HEAD)
        for number in self._nodes:  # one by one: a raylet ends if the agent beside it does not start in time
            self._start_node(number)
            self._wait(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End with the hosts, which are killed."""

    def kill(self, number: int) -> None:
        self.hosts[number].kill()
        self._nodes.remove(number)

    def add_node(self, number: int) -> None:
        """Start a node on a host, which is started, too, if it was killed."""
        if number not in self._nodes:
            self.hosts.restart(number)
            self._nodes.add(number)
            self._start_node(number)
            self._wait(number)

    def _start_node(self, number: int) -> None:
        self._start(number, f"--address={self.address}", "--num-cpus=2", f"--num-gpus={GPUS}")

    def _start(self, number: int, *options: str) -> None:
        host = self.hosts[number]
        own = [f"--node-ip-address={host.address}", f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"]
        with open(self._log(number), "wb") as log:
            command = [PYTHON, "-m", "ray.scripts.scripts", "start", *options, *own, "--block"]
            host.popen(*command, env=SETTINGS, output=log)

    def _wait(self, number: int) -> None:
        wait_for(lambda: STARTED in self._log(number).read_text(), f"Ray on host{number}", timeout=300)

    def _log(self, number: int) -> Path:
        return self._directory / f"host{number}.log"
