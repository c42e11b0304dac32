"""Manifests of three shapes of run: valid by the schemas of Kubernetes and JobSet, and without secrets."""

from __future__ import annotations

import copy
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet as JobSet
from pydantic import ValidationError

from headrace.cli.main import main, parse
from headrace.config.base import ConfigError
from headrace.launch.manifest import MAX_NAME, manifest
from headrace.runfile.reading import load, validate
from headrace.runfile.run import RunConfig
from tests.refusals import refused
from tests.snapshots import SnapshotPage

KUBERNETES = ("1.29", "1.37")
"""The first version that starts sidecars, and the newest whose schemas we have."""
RUN_FILE = """
output_dir = "outputs/reverse-text"
max_steps = 50
seq_len = 64
model = "Qwen/Qwen3-0.6B"
orchestrator.train.env = [{ id = "reverse-text" }]
launch.kubernetes.image = "headrace:0.1"
"""
ONE_GPU = "one GPU for trainer and server"
THREE_NODES = "one trainer node and two inference nodes"
TWELVE_NODES = "four trainer nodes and eight inference nodes with servers of four GPUs, and a spare node"
SHAPES = {
    ONE_GPU: "launch.gpus_per_node = 1",
    THREE_NODES: """
launch.trainer_nodes = 1
launch.inference_nodes = 2
launch.gpus_per_node = 8
launch.kubernetes.namespace = "research"
launch.kubernetes.secrets = { HF_TOKEN = "hub/token", WANDB_API_KEY = "wandb/api-key" }
launch.kubernetes.node_selector = { gpu = "h200" }
launch.kubernetes.tolerations = [{ key = "nvidia.com/gpu", operator = "Exists", effect = "NoSchedule" }]
launch.kubernetes.labels = { "kueue.x-k8s.io/queue-name" = "research" }
""",
    TWELVE_NODES: """
inference.engine = "vllm"
inference.vllm.tensor_parallel_size = 4
launch.trainer_nodes = 4
launch.inference_nodes = 8
launch.spare_nodes = 1
launch.gpus_per_node = 8
launch.kubernetes.claim = "shared"
launch.kubernetes.resources = { cpu = "96", memory = "1Ti", "rdma/ib" = "8" }
""",
}
PODS = {
    ONE_GPU: {"driver": 1, "trainer": 1},
    THREE_NODES: {"driver": 1, "trainer": 1, "inference": 2},
    TWELVE_NODES: {"driver": 1, "trainer": 4, "inference": 8, "spare": 1},
}
GPUS = {ONE_GPU: "1", THREE_NODES: "8", TWELVE_NODES: "8"}


def written(tmp_path: Path, *keys: str) -> str:
    """Return the manifest of the run file with these keys, later ones over earlier ones."""
    files = [tmp_path / f"{number}.toml" for number in range(len(keys) + 1)]
    for file, text in zip(files, (RUN_FILE, *keys), strict=True):
        file.write_text(text)
    return manifest(load(RunConfig, files, ["--launch.on", "nodes"])[0])


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def text(shape: str, tmp_path: Path) -> str:
    return written(tmp_path, SHAPES[shape])


@pytest.fixture
def objects(text: str) -> dict[str, Any]:
    """The objects by kind; each occurs once."""
    documents = [document for document in yaml.safe_load_all(text) if document]
    by_kind = {document["kind"]: document for document in documents}
    assert len(by_kind) == len(documents)
    return by_kind


def jobs_of(jobset: Any) -> dict[str, Any]:
    return {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}


def containers_of(job: Any) -> list[Any]:
    pod = job["template"]["spec"]
    return [*pod["containers"], *pod.get("initContainers", [])]


def check(document: Any) -> None:
    """Raise if an object is not valid. Generated models ignore unknown fields, so that they must return all of them."""
    if document["kind"] == "JobSet":
        assert JobSet.from_dict(document).to_dict() == document
        for name, job in jobs_of(document).items():
            check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job})
        return
    for version in KUBERNETES:
        kubernetes_validate.validate(document, version, strict=True)


def test_every_object_is_valid(objects: dict[str, Any]) -> None:
    for document in objects.values():
        check(document)


@pytest.fixture(scope="module")
def page() -> Iterator[SnapshotPage]:
    page = SnapshotPage("manifests")
    yield page
    page.close()


def test_the_manifest_is_that_of_its_snapshot(shape: str, text: str, page: SnapshotPage) -> None:
    page.check(shape, re.sub(r"(?<=run\.toml: \|\n)(    .*\n|\n)+", "    (the resolved run file)\n", text))


def container(path: str, value: Any) -> Callable[[Any], None]:
    def damage(jobset: Any) -> None:
        jobs_of(jobset)["trainer"]["template"]["spec"]["containers"][0][path] = value

    return damage


def job(path: str, value: Any) -> Callable[[Any], None]:
    return lambda jobset: jobs_of(jobset)["trainer"].__setitem__(path, value)


def of_set(path: str, value: Any) -> Callable[[Any], None]:
    return lambda jobset: jobset["spec"].__setitem__(path, value)


@pytest.mark.parametrize(
    "damage",
    [
        container("volumeMounts", [{"name": "runs"}]),
        container("comand", ["headrace"]),
        container("env", {"HOME": "/tmp"}),
        container("livenessProbe", {"periodSeconds": "ten"}),
        job("parallelism", "two"),
        job("backofLimit", 3),
        of_set("failurePolicy", {"maxRestarts": "ten"}),
        of_set("failurePolicy", {"maxRestart": 10}),
        of_set("replicatedJobs", [{"name": "driver", "replicas": 1}]),
        of_set("successPolicy", {"targetReplicatedJobs": ["driver"]}),
    ],
)
def test_a_damaged_field_is_refused_by_the_schema(damage: Callable[[Any], None], tmp_path: Path) -> None:
    text = written(tmp_path, SHAPES[ONE_GPU])
    (jobset,) = [document for document in yaml.safe_load_all(text) if document["kind"] == "JobSet"]
    check(jobset)
    damaged = copy.deepcopy(jobset)
    damage(damaged)
    with pytest.raises((ValidationError, kubernetes_validate.ValidationError, AssertionError)):
        check(damaged)


def test_the_set_has_the_pods_of_the_run(shape: str, objects: dict[str, Any]) -> None:
    jobs = jobs_of(objects["JobSet"])
    assert {name: job["parallelism"] for name, job in jobs.items()} == PODS[shape]
    assert all(job["parallelism"] == job["completions"] for job in jobs.values())


def test_pods_have_the_gpus_of_their_processes(shape: str, objects: dict[str, Any]) -> None:
    for name, job in jobs_of(objects["JobSet"]).items():
        counts = [container["resources"]["limits"].get("nvidia.com/gpu") for container in containers_of(job)]
        assert counts == ([None, None] if name == "driver" else [GPUS[shape]])


def test_every_reference_leads_to_an_object_of_the_manifest(objects: dict[str, Any]) -> None:
    driver = f"http://{objects['Service']['metadata']['name']}:{objects['Service']['spec']['ports'][0]['port']}"
    claim = objects.get("PersistentVolumeClaim", {"metadata": {"name": "shared"}})["metadata"]["name"]
    for job in jobs_of(objects["JobSet"]).values():
        volumes = {volume["name"]: volume for volume in job["template"]["spec"]["volumes"]}
        assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim
        assert (
            volumes.get("run-file", {}).get("configMap", objects["ConfigMap"]["metadata"])["name"]
            == (objects["ConfigMap"]["metadata"]["name"])
        )
        for container in containers_of(job):
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            values = {entry["name"]: entry.get("value") for entry in container["env"]}
            assert values["HEADRACE_DRIVER"] == driver
    selector = objects["Service"]["spec"]["selector"]
    assert selector["jobset.sigs.k8s.io/jobset-name"] == objects["JobSet"]["metadata"]["name"]
    assert selector["jobset.sigs.k8s.io/replicatedjob-name"] in jobs_of(objects["JobSet"])


def test_pods_have_no_rights(objects: dict[str, Any]) -> None:
    for job in jobs_of(objects["JobSet"]).values():
        context = job["template"]["spec"]["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert job["template"]["spec"]["automountServiceAccountToken"] is False
        for container in containers_of(job):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_a_lost_node_is_replaced_and_a_lost_driver_restarts_the_set(objects: dict[str, Any]) -> None:
    jobs = jobs_of(objects["JobSet"])
    driver = jobs.pop("driver")
    assert driver["backoffLimit"] == 0
    (rule,) = driver["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [1, 2])
    (policy,) = objects["JobSet"]["spec"]["failurePolicy"]["rules"]
    assert (policy["action"], policy["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    # A policy for failures would make the Job wait for the end of a pod on a machine that no longer answers.
    assert all(job["backoffLimit"] > 1000 and "podFailurePolicy" not in job for job in jobs.values())
    assert objects["JobSet"]["spec"]["successPolicy"]["targetReplicatedJobs"] == ["driver"]


def test_the_commands_are_understood(objects: dict[str, Any]) -> None:
    for job in jobs_of(objects["JobSet"]).values():
        for container in containers_of(job):
            words = container["command"]
            if words[0] == "/bin/sh":
                words = shlex.split(words[-1].removeprefix("exec ").split(" $(")[0])
            arguments = parse(words[1:])
            assert arguments.command == ("rl" if container["name"] == "driver" else "node")


def test_the_run_file_in_the_manifest_is_that_run(objects: dict[str, Any]) -> None:
    (content,) = objects["ConfigMap"]["data"].values()
    config, _ = validate(RunConfig, tomllib.loads(content), "manifest")
    assert (config.launch.on, config.model.name) == ("nodes", "Qwen/Qwen3-0.6B")


def test_secrets_are_only_named(tmp_path: Path) -> None:
    text = written(tmp_path, SHAPES[THREE_NODES])
    entries = [
        entry
        for document in yaml.safe_load_all(text)
        if document["kind"] == "JobSet"
        for job in jobs_of(document).values()
        for container in containers_of(job)
        for entry in container["env"]
    ]
    by_reference = {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in entries if "valueFrom" in entry}
    assert by_reference == {
        "HEADRACE_DRIVER_KEY": {"name": "reverse-text-driver", "key": "key"},
        "HF_TOKEN": {"name": "hub", "key": "token"},
        "WANDB_API_KEY": {"name": "wandb", "key": "api-key"},
    }
    assert all("value" not in entry for entry in entries if entry["name"] in by_reference)
    assert "kind: Secret" not in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("launch.kubernetes.image", '"null"'),
        ("launch.gpus_per_node", '"null"'),
        ("launch.kubernetes.name", '"Upper"'),
        ("launch.kubernetes.name", f'"{"x" * (MAX_NAME + 1)}"'),
        ("launch.kubernetes.storage", '"2TB"'),
        ("launch.kubernetes.user", "0"),
        ("launch.kubernetes.secrets.HF_TOKEN", '"hf_abc"'),
        ("launch.env.HF_TOKEN", '"hf_abc"'),
        ("launch.env_from.HF_TOKEN", '"MY_TOKEN"'),
        ("model.name", '"."'),
        ("launch.inference_gpus", "9"),
        ("launch.trainer_processes", "9"),
    ],
)
def test_a_run_that_pods_cannot_run_is_refused_with_its_key(key: str, value: str, tmp_path: Path) -> None:
    with refused(ConfigError) as error:
        written(tmp_path, "launch = { trainer_nodes = 2, inference_nodes = 2, gpus_per_node = 4 }", f"{key} = {value}")
    assert error.value.key == key


def test_a_long_name_of_the_run_directory_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, key="launch.kubernetes.name"):
        written(tmp_path, f'launch.gpus_per_node = 1\noutput_dir = "{"x" * (MAX_NAME + 1)}"')


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rl.toml").write_text(RUN_FILE)
    command = ["manifest", str(tmp_path / "rl.toml"), "--launch.gpus_per_node", "1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert main([*command, "--output", str(tmp_path / "run.yaml")]) == 0
    assert (tmp_path / "run.yaml").read_text() == printed
