"""The containers of a manifest as processes of this machine: the run ends, also after lost pods."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headrace.launch.addresses import find_free_ports
from headrace.launch.manifest import DRIVER_PORT, manifest
from headrace.observe.metrics import read_metrics
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.transport.run_dir import RunDir
from tests.end_to_end.runs import REPOSITORY, headrace, wait_until, write_run_file

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
LIMIT_S = 300.0


class Pods:
    """Starts the containers of a JobSet, with folders of this machine for the volumes of the cluster."""

    def __init__(self, text: str, folder: Path) -> None:
        self.port = find_free_ports(1)[0]
        name = "run-driver"
        text = text.replace("/runs", str(folder / "runs")).replace("/etc/headrace", str(folder / "etc"))
        text = text.replace(f"{name}:{DRIVER_PORT}", f"127.0.0.1:{self.port}").replace(str(DRIVER_PORT), str(self.port))
        objects = {document["kind"]: document for document in yaml.safe_load_all(text)}
        (folder / "etc").mkdir()
        for file, content in objects["ConfigMap"]["data"].items():
            (folder / "etc" / file).write_text(content)
        self.folder, self.key = folder, secrets.token_hex(16)
        self.containers: dict[str, Any] = {}
        """By name of the pod, which is that of its host; the agent beside the driver is a pod here."""
        for job in objects["JobSet"]["spec"]["replicatedJobs"]:
            pod = job["template"]["spec"]["template"]["spec"]
            for container in (*pod.get("initContainers", ()), *pod["containers"]):
                self.containers[f"{job['name']}-{container['name']}"] = container
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, pod: str) -> None:
        container = self.containers[pod]
        own = self.folder / pod
        own.mkdir(exist_ok=True)
        (own / "node").unlink(missing_ok=True)  # a new pod has a new /tmp
        env = {entry["name"]: entry.get("value", self.key) for entry in container["env"]}
        # All pods have the host name of this machine: the variable stands for that of a pod.
        env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SLURMD_NODENAME": pod, "HOME": str(own)}
        env |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        with open(own / "log", "ab") as log:
            command = self.command(pod, container["command"])
            self.processes[pod] = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def command(self, pod: str, words: list[str]) -> list[str]:
        return [word.replace("/tmp/node", str(self.folder / pod / "node")) for word in words]

    def lose(self, pod: str) -> None:
        """Kill the first process of a pod; its children end with it."""
        os.killpg(self.processes[pod].pid, signal.SIGKILL)
        self.processes[pod].wait()

    def passes(self, pod: str, probe: str) -> bool:
        action = self.containers[pod][probe]
        if "httpGet" in action:
            try:
                return httpx.get(f"http://127.0.0.1:{self.port}{action['httpGet']['path']}").is_success
            except httpx.TransportError:
                return False
        return subprocess.run(self.command(pod, action["exec"]["command"]), check=False).returncode == 0

    def wait(self, pod: str) -> int:
        wait_until(lambda: self.processes[pod].poll() is not None, f"the end of {pod}", LIMIT_S)
        return int(self.processes[pod].returncode)

    def log(self, pod: str) -> str:
        return (self.folder / pod / "log").read_text()


@pytest.fixture
def pods(tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest) -> Any:
    """With the run file's keys of a parameter."""
    file = write_run_file(tmp_path, tiny_model)
    keys = {"launch.kubernetes.image": "headrace:0.1", "launch.gpus_per_node": "0", "max_steps": "8"}
    keys |= {"launch.trainer_nodes": "1", "launch.inference_nodes": "1", "launch.on": "nodes"}
    keys |= {"trainer.ckpt.interval": "1", "model.name": "/runs/model", **getattr(request, "param", {})}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/model").symlink_to(tiny_model)
    config, _ = load(RunConfig, [file], [word for key, value in keys.items() for word in (f"--{key}", value)])
    pods = Pods(manifest(config), tmp_path)
    for pod in pods.containers:
        pods.start(pod)
    yield pods
    for process in pods.processes.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def steps(run: RunDir) -> int:
    return max((record["step"] for record in read_metrics(run.metrics) if "loss" in record), default=0)


def test_a_lost_node_joins_again_and_a_lost_driver_resumes_the_run(pods: Pods) -> None:
    run = RunDir(pods.folder / "runs/run")
    nodes = ["trainer-node", "inference-node", "driver-node"]
    wait_until(lambda: all(pods.passes(pod, "readinessProbe") for pod in pods.containers), "all pods ready", LIMIT_S)
    assert all(pods.passes(pod, "livenessProbe") for pod in pods.containers)
    wait_until(lambda: steps(run) >= 1, "the first step", LIMIT_S)

    pods.lose("trainer-node")
    pods.start("trainer-node")  # by its Job
    before = steps(run)
    wait_until(lambda: steps(run) > before + 1, "a step after the loss of the trainer", LIMIT_S)

    pods.lose("driver-driver")
    for pod in nodes:  # the JobSet starts again as a whole
        pods.lose(pod)
    for pod in pods.containers:
        pods.start(pod)
    assert pods.wait("driver-driver") == 0, pods.log("driver-driver")
    assert [pods.wait(pod) for pod in nodes] == [0, 0, 0]
    assert steps(run) == 8
    code, output = headrace("audit", run.root)
    assert code == 0, output


@pytest.mark.parametrize("pods", [{"max_steps": "100000", "trainer.ckpt.interval": "100000"}], indirect=True)
def test_an_evicted_driver_has_a_checkpoint_written_before_it_stops(pods: Pods) -> None:
    run = RunDir(pods.folder / "runs/run")
    wait_until(lambda: steps(run) >= 2, "two steps", LIMIT_S)
    pods.processes["driver-driver"].terminate()
    assert pods.wait("driver-driver") == 128 + signal.SIGTERM, pods.log("driver-driver")
    assert run.latest_checkpoint_step() == steps(run) >= 2
