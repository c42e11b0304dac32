"""A Ray cluster on namespaced hosts: the head, which takes no work, on host 1, a node on each of the others.

An autoscaling one starts its nodes on the host of the head, with Ray's own autoscaler.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
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
        self._start_head("--num-cpus=0")
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

    def _start_head(self, *options: str, env: Mapping[str, str] | None = None) -> None:
        head = ["--head", f"--port={PORT}", "--num-gpus=0", "--dashboard-host=0.0.0.0"]
        self._start(HEAD, *head, *options, env=env)
        self._wait(HEAD)

    def _start(self, number: int, *options: str, env: Mapping[str, str] | None = None) -> None:
        host = self.hosts[number]
        own = [f"--node-ip-address={host.address}", f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"]
        with open(self._log(number), "wb") as log:
            command = [PYTHON, "-m", "ray.scripts.scripts", "start", *options, *own, "--block"]
            host.popen(*command, env={**SETTINGS, **(env or {})}, output=log)

    def _wait(self, number: int) -> None:
        wait_for(lambda: STARTED in self._log(number).read_text(), f"Ray on host{number}", timeout=300)

    def _log(self, number: int) -> Path:
        return self._directory / f"host{number}.log"


class AutoscalingCluster(RayCluster):
    """A head with one CPU, which adds nodes with a CPU and a GPU on demand, and removes idle ones.

    Configured as by `ray.cluster_utils.AutoscalingCluster`.
    """

    HEAD_ID = "f" * 51 + "00000"
    """By which Ray's provider of processes as nodes knows the head."""

    def __init__(self, hosts: HostSet, directory: Path, max_nodes: int) -> None:
        super().__init__(hosts, directory, nodes=0)
        node = {"CPU": 1, "GPU": 1, "object_store_memory": STORE_BYTES}
        self._config = {
            "cluster_name": "test",
            "provider": {
                "type": "external",  # `fake_multinode` reads a file with defaults, which Ray's wheel lacks
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "gcs_address": self.address,
                "head_node_id": self.HEAD_ID,
                "launch_multiple": True,
                "use_node_id_as_ip": True,  # the nodes share an address
                "disable_node_updaters": True,
            },
            "max_workers": max_nodes,
            "idle_timeout_minutes": 0.1,
            "file_mounts": {},
            **{f"{kind}setup_commands": [] for kind in ("", "head_", "worker_")},
            "cluster_synced_files": [],
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
                # Without `max_workers` the autoscaler adds none, and reports that no type of node fits.
                "gpu": {"resources": node, "node_config": {}, "min_workers": 0, "max_workers": max_nodes},
            },
        }

    def __enter__(self) -> AutoscalingCluster:
        self._directory.mkdir()
        config = self._directory / "autoscaling.json"
        config.write_text(json.dumps(self._config))
        ids = {"RAY_CLOUD_INSTANCE_ID": self.HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": self.HEAD_ID}
        autoscaler = {"RAY_enable_autoscaler_v2": "1", "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        self._start_head("--num-cpus=1", f"--autoscaling-config={config}", env={**ids, **autoscaler})
        return self

    def added_nodes(self) -> int:
        return len(self.hosts[HEAD].send_signal(0, containing="raylet/raylet")) - 1
