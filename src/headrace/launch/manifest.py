"""Kubernetes objects of a run: a JobSet of a driver and of pods that join it, and what these pods need.

All pods run `headrace node`, on which the supervisor in the driver starts and restarts the processes of the run, as on
other hosts. Kubernetes replaces pods: a lost node by one that joins again; a lost driver by a restart of the whole set,
which resumes the run. A run that failed (exit status 1 or 2 of the driver) ends the set. Secrets are only named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml  # type: ignore[import-untyped]

from headrace.config.base import ConfigError
from headrace.config.files import dump
from headrace.config.launch import KubernetesConfig, LaunchConfig
from headrace.launch.hosts.base import Host, HostRole
from headrace.launch.node import JOINED
from headrace.launch.placement import place
from headrace.launch.processes import needs_of
from headrace.machine import CACHE_VARIABLE
from headrace.runfile.reading import leaves
from headrace.runfile.run import AnyRun
from headrace.transport.announcements import DRIVER_VAR, KEY_VAR

VOLUME = PurePosixPath("/runs")
"""Where all pods mount the shared volume."""
RUN_FILE = PurePosixPath("/etc/headrace/run.toml")
DRIVER_PORT = 7700
MAX_NAME = 40
"""Characters of a JobSet's name: Kubernetes appends to it, and limits the name of a pod to 63."""
JOBSET_NAME = rf"(?=.{{1,{MAX_NAME}}}$)[a-z]([-a-z0-9]*[a-z0-9])?"
LAUNCHER_RESOURCES = {"cpu": "1", "memory": "4Gi"}
UNLIMITED = 2**31 - 1
"""Replaced pods of nodes: the supervisor decides when a run has failed, not their Job."""
STOP_S = 120
"""Time in which a deleted pod stops its processes; a checkpoint may be being written. The driver also has one written
before (`save_timeout`)."""
START_S = 1800
"""Time until the driver answers: it may have to download the model. Also until a lost pod was replaced."""
JOIN_S = 86400
"""Time until all pods have joined: a busy cluster starts them one after the other."""
LOST_S = 30
"""Time until the pods of a machine that does not answer are replaced; the default of Kubernetes is 300."""
NODE_STATE = PurePosixPath("/tmp/node")
IS_RECENT = f'test -n "$(find {NODE_STATE} -mmin -1)"'
ENVIRONMENT = {
    "HOME": "/tmp",  # the user of the pods has none in the image
    "HF_HOME": str(VOLUME / ".cache/huggingface"),
    CACHE_VARIABLE: str(VOLUME / ".cache/headrace"),
}
SECRET_VARIABLE = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)

Object = dict[str, Any]


def manifest(config: AnyRun) -> str:
    """Return the objects as YAML, with the placement of the run's processes as a comment."""
    pods = Pods(config)
    comments = [
        f"The run {pods.run} as a JobSet. Create the secrets that it names, then: kubectl apply -f FILE",
        *(f"secret {name}, key {key}: {variable}" for variable, (name, key) in pods.secrets.items()),
        *(
            f"{host.name}: {', '.join(place.name for place in pods.placement.on(host.name)) or 'idle'}"
            for host in pods.placement.hosts
        ),
    ]
    documents = yaml.dump_all(pods.objects(), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)
    return "".join(f"# {line}\n" for line in comments) + f"---\n{documents}"


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes texts of several lines as such, and repeats what occurs twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


class Pods:
    """The pods of a run. Raises `ConfigError` if they cannot run it."""

    def __init__(self, config: AnyRun) -> None:
        self.config, self.settings = config, config.launch.kubernetes or KubernetesConfig()
        self.command = config.COMMAND
        if self.settings.image is None:
            fix = "Name an image that contains Headrace: repository:tag."
            raise ConfigError("not set", key="launch.kubernetes.image", fix=fix)
        if config.launch.gpus_per_node is None:
            raise ConfigError("not set", key="launch.gpus_per_node", fix="Set the GPUs of each pod; 0 for CPUs alone.")
        if config.output_dir is None:
            raise ConfigError(
                "not set", key="output_dir", fix="Set the directory of the run: --output_dir outputs/NAME."
            )
        self.name = self.settings.name or re.sub(r"[^a-z0-9]+", "-", config.output_dir.name.lower()).strip("-")
        if not re.fullmatch(JOBSET_NAME, self.name):
            fact = f"a JobSet's name is a letter and up to {MAX_NAME - 1} lowercase letters, digits and hyphens"
            raise ConfigError(fact, key="launch.kubernetes.name", value=self.name, fix="Set another one.")
        refuse_secrets(config.launch, self.settings.secrets)
        refuse_local_paths(config)
        self.run = VOLUME / config.output_dir.name
        secrets = {KEY_VAR: f"{self.name}-driver/key", **self.settings.secrets}
        self.secrets = {variable: source.split("/") for variable, source in secrets.items()}
        needs = needs_of(config)
        training = needs.trainer_nodes or 1
        sampling = needs.nodes - training - needs.spare_nodes
        numbers: dict[HostRole, int] = {"trainer": training, "inference": sampling, "spare": needs.spare_nodes}
        self.groups = {role: number for role, number in numbers.items() if number}
        """Pods by what they are meant for."""
        gpus = tuple(str(index) for index in range(config.launch.gpus_per_node))
        hosts = [Host(f"{self.name}-driver-0-0", role="orchestrator")]
        for role, number in self.groups.items():
            hosts += [Host(f"{self.name}-{role}-0-{index}", gpus=gpus, role=role) for index in range(number)]
        self.placement = place(hosts, needs)

    def objects(self) -> Iterator[Object]:
        """Yield the objects in the order in which they are created."""
        settings = self.settings
        if settings.claim is None:
            storage_class = {"storageClassName": settings.storage_class} if settings.storage_class else {}
            size = {"requests": {"storage": settings.storage}}
            claim = {"accessModes": ["ReadWriteMany"], **storage_class, "resources": size}
            yield self._object("v1", "PersistentVolumeClaim", f"{self.name}-runs", spec=claim)
        yield self._object("v1", "ConfigMap", f"{self.name}-run-file", data={RUN_FILE.name: dump(self.config)})
        labels = {"jobset-name": self.name, "replicatedjob-name": "driver"}
        service = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the driver is ready when its nodes have found it
            "selector": {f"jobset.sigs.k8s.io/{key}": value for key, value in labels.items()},
            "ports": [{"name": "driver", "port": DRIVER_PORT}],
        }
        yield self._object("v1", "Service", f"{self.name}-driver", spec=service)
        jobset = self._object("jobset.x-k8s.io/v1alpha2", "JobSet", self.name, spec=self._jobset())
        if settings.labels:
            jobset["metadata"]["labels"] = dict(settings.labels)
        yield jobset

    def _object(self, version: str, kind: str, name: str, **content: Object) -> Object:
        namespace = {"namespace": self.settings.namespace} if self.settings.namespace else {}
        return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **namespace}, **content}

    def _jobset(self) -> Object:
        jobs: dict[str, Object] = {"driver": self._driver()}
        jobs |= {role: self._nodes(role, number) for role, number in self.groups.items()}
        failed = {"name": "runFailed", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        return {
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["driver"]},
            "failurePolicy": {"maxRestarts": self.settings.max_restarts, "rules": [failed]},
            "replicatedJobs": [{"name": name, "replicas": 1, "template": {"spec": job}} for name, job in jobs.items()],
        }

    def _driver(self) -> Object:
        """Return the Job of the launcher. A node beside it takes the orchestrator, which needs no GPU."""
        words = f"headrace {self.command} {RUN_FILE} --output_dir {self.run} --launch.on nodes"
        words += f" --launch.driver_port {DRIVER_PORT} --launch.join_timeout {JOIN_S} --launch.start_timeout {START_S}"
        words += " --launch.save_on_sigterm true"
        health = {"httpGet": {"path": "/health", "port": "driver"}, "timeoutSeconds": 5}
        launcher = {
            **self._container("driver", LAUNCHER_RESOURCES),
            "command": ["/bin/sh", "-c", f"exec {words} $(test ! -f {self.run}/config.toml || echo --resume)"],
            "ports": [{"name": "driver", "containerPort": DRIVER_PORT, "protocol": "TCP"}],
            "startupProbe": {**health, "periodSeconds": 5, "failureThreshold": START_S // 5},
            "readinessProbe": {**health, "periodSeconds": 5},
            "livenessProbe": {**health, "periodSeconds": 10, "failureThreshold": 6},
        }
        launcher["volumeMounts"].append({"name": "run-file", "mountPath": str(RUN_FILE.parent), "readOnly": True})
        # A sidecar: it is restarted by itself, and does not keep the pod from completing.
        node = {**self._node("orchestrator", self.settings.driver_resources), "restartPolicy": "Always"}
        pod = self._pod(launcher, initContainers=[node])
        pod["terminationGracePeriodSeconds"] = self.settings.save_timeout + STOP_S
        pod["volumes"].append({"name": "run-file", "configMap": {"name": f"{self.name}-run-file"}})
        failed = {"containerName": "driver", "operator": "In", "values": [1, 2]}
        policy = {"rules": [{"action": "FailJob", "onExitCodes": failed}]}
        return {**_indexed(1, pod), "backoffLimit": 0, "podFailurePolicy": policy}

    def _nodes(self, group: str, number: int) -> Object:
        """Return the Job of a group of nodes, which replaces pods until the set has ended."""
        gpus = {self.settings.gpu_resource: str(self.config.launch.gpus_per_node)}
        pod = self._pod(self._node(group, {**self.settings.resources, **gpus}))
        if self.settings.node_selector:
            pod["nodeSelector"] = dict(self.settings.node_selector)
        pod["tolerations"] += [entry.model_dump(exclude_none=True) for entry in self.settings.tolerations]
        return {**_indexed(number, pod), "backoffLimit": UNLIMITED}

    def _node(self, role: str, resources: Mapping[str, str]) -> Object:
        """Return the container of a node agent. It is ready when it has joined, and alive while its loop runs."""
        command = ["headrace", "node", str(self.run), "--role", role, "--wait", str(START_S)]
        return {
            **self._container("node", resources),
            "command": [*command, "--state", str(NODE_STATE)],
            "startupProbe": {"exec": {"command": ["test", "-f", str(NODE_STATE)]}, "failureThreshold": 30},
            "readinessProbe": {"exec": {"command": ["grep", "-q", JOINED, str(NODE_STATE)]}, "periodSeconds": 5},
            "livenessProbe": {"exec": {"command": ["/bin/sh", "-c", IS_RECENT]}, "periodSeconds": 20},
        }

    def _container(self, name: str, resources: Mapping[str, str]) -> Object:
        """Return what all containers have. CPU time is not limited: throttled threads would stall all ranks."""
        variables = {DRIVER_VAR: f"http://{self.name}-driver:{DRIVER_PORT}", **ENVIRONMENT}
        env: list[Object] = [{"name": variable, "value": value} for variable, value in variables.items()]
        for variable, (secret, key) in self.secrets.items():
            env.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
        limits = {key: amount for key, amount in resources.items() if key != "cpu"}
        return {
            "name": name,
            "image": self.settings.image,
            "env": env,
            "resources": {"requests": dict(resources), "limits": limits},
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [
                {"name": "runs", "mountPath": str(VOLUME)},
                {"name": "shared-memory", "mountPath": "/dev/shm"},
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }

    def _pod(self, container: Object, **more: Any) -> Object:
        user, claim = self.settings.user, self.settings.claim or f"{self.name}-runs"
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": STOP_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "shareProcessNamespace": True,  # its first process reaps the children of killed ones
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": user,
                "runAsGroup": user,
                "fsGroup": user,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **more,
            "containers": [container],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
                {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": self.settings.shared_memory}},
                {"name": "tmp", "emptyDir": {}},
            ],
            "tolerations": [
                {
                    "key": f"node.kubernetes.io/{state}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": LOST_S,
                }
                for state in ("not-ready", "unreachable")
            ],
        }


def _indexed(pods: int, pod: Object) -> Object:
    """Return the part of a Job that has one pod per index: a pod that replaces another has its host name."""
    return {"completionMode": "Indexed", "completions": pods, "parallelism": pods, "template": {"spec": pod}}


def refuse_secrets(launch: LaunchConfig, secrets: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a secret in the run file, and for one that the pods would miss."""
    fix = 'Name its secret instead: launch.kubernetes.secrets.{} = "SECRET/KEY".'
    for name in launch.env:
        if SECRET_VARIABLE.search(name):
            fact = "the manifest would contain its value"
            raise ConfigError(fact, key=f"launch.env.{name}", fix=f"Remove it. {fix.format(name)}")
    for name, source in launch.env_from.items():
        if source not in secrets:
            fact = f"the pods have no variable {source}"
            raise ConfigError(fact, key=f"launch.env_from.{name}", value=source, fix=fix.format(source))


def refuse_local_paths(config: AnyRun) -> None:
    """Raise `ConfigError` for a file or directory of this machine, which the pods do not see."""
    for key, value in leaves(config.model_dump(mode="json", exclude_none=True)).items():
        is_path = isinstance(value, str) and (key.endswith("model.name") or value.startswith("/"))
        if is_path and not PurePosixPath(value).is_relative_to(VOLUME) and Path(value).exists():
            fact = "a path of this machine, which the pods do not see"
            fix = f"Copy it to the volume, and name it by its path under {VOLUME}."
            raise ConfigError(fact, key=key, value=value, fix=fix)
