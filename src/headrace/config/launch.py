"""`[launch]`: the processes of a run and their devices; `[launch.kubernetes]`: its pods."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from headrace.config.base import Config
from headrace.config.model import HttpUrl
from headrace.errors import InvalidValue
from headrace.machine import CACHE_VARIABLE

Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kMGTP]i?)?$")]
"""An amount as Kubernetes writes it: `500m`, `8`, `64Gi`."""


class TolerationConfig(Config):
    """A taint that pods with GPUs tolerate, as in a pod of Kubernetes."""

    key: str | None = None
    """The key of the taint; unset, with `operator = "Exists"`: all taints."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Whether the value of the taint is compared."""
    value: str | None = None
    """The value of the taint, for `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The effect of the taint; unset: any."""


class KubernetesConfig(Config):
    """The pods that `headrace manifest` writes, and what they get from the cluster."""

    name: str | None = Field(None, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=40)
    """The name of the JobSet; unset: that of the run directory."""
    namespace: str | None = None
    """The namespace of all objects; unset: that of `kubectl`."""
    image: str | None = None
    """The container image of all pods (`repository:tag`), which contains Headrace. `headrace manifest` needs it."""
    claim: str | None = None
    """A PersistentVolumeClaim that exists, for the run directories; several pods write to it. Unset: a new one."""
    storage: Quantity = "200Gi"
    """The size of the new claim."""
    storage_class: str | None = None
    """The storage class of the new claim, with `ReadWriteMany`; unset: the cluster's default."""
    resources: dict[str, Quantity] = Field(default_factory=lambda: {"cpu": "8", "memory": "64Gi"})
    """What each pod with GPUs gets besides them; other devices, too: `"rdma/ib" = "1"`."""
    driver_resources: dict[str, Quantity] = Field(default_factory=lambda: {"cpu": "4", "memory": "16Gi"})
    """What the pod of the driver gets for the orchestrator and its environments."""
    gpu_resource: str = "nvidia.com/gpu"
    """The name under which the cluster counts GPUs; `gpus_per_node` is their number in each pod."""
    shared_memory: Quantity = "16Gi"
    """The size of `/dev/shm`, which counts as memory of the pod."""
    secrets: dict[str, Annotated[str, Field(pattern=r"^[a-z0-9][-a-z0-9.]*/[-._a-zA-Z0-9]+$")]] = Field(
        default_factory=dict
    )
    """Environment variables from secrets: `HF_TOKEN = "SECRET/KEY"`. `HEADRACE_DRIVER_KEY` is `NAME-driver/key`."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the machines for pods with GPUs."""
    tolerations: list[TolerationConfig] = Field(default_factory=list)
    """Taints of the machines for pods with GPUs."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the JobSet: `"kueue.x-k8s.io/queue-name" = "QUEUE"`."""
    user: int = Field(1000, ge=1)
    """The number of the user and group as which all pods run."""
    save_timeout: int = Field(480, ge=0)
    """Seconds that an evicted driver has for a last step and its checkpoint; Kubernetes kills its pod two minutes
    later."""
    max_restarts: int = Field(10, ge=0)
    """Restarts of the whole set, after the driver's pod was lost or killed."""


EXPORTED_WINS = ("HF_HUB_OFFLINE", "WANDB_MODE")
"""Environment variables whose exported value takes precedence over that of a run file."""


def without_exported(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a run file, without those that an exported value overrides."""
    return {name: value for name, value in env.items() if not (name in EXPORTED_WINS and os.environ.get(name))}


class SlurmConfig(Config):
    """`[launch.slurm]`: the batch job of a run, where `on` is `slurm`."""

    partition: str | None = None
    """The partition; unset: the cluster's default."""
    account: str | None = None
    """The account that is charged; unset: your default."""
    time: int | str | None = None
    """The time limit in minutes, or as `sbatch --time` takes it (`"24:00:00"`, `"2-00"`); unset: that of the
    partition."""
    requeue: bool = True
    """Whether the job is queued again at its time limit, and after the loss of its first host, to continue the run."""
    signal_before: int = Field(120, ge=10)
    """Seconds before the time limit at which the run writes a checkpoint and stops."""
    lines: list[str] = Field(default_factory=list)
    """Further `#SBATCH` lines of the batch script, without `#SBATCH`: `["--exclusive", "--qos=high"]`."""
    prologue: str = ""
    """Shell lines of the batch script before anything starts on a host: modules, containers, variables."""


class RayConfig(Config):
    """`[launch.ray]`: the Ray cluster of a run, where `on` is `ray`."""

    address: str | None = None
    """Address of the cluster, as `ray start --head` prints it (`HOST:6379`); unset: that of `RAY_ADDRESS`, which `ray
    job submit` sets, else a cluster that runs here, else one that is started here."""
    autoscaling: bool = False
    """Whether the cluster adds hosts on demand: the run waits for hosts that are missing, instead of an error."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's `runtime_env` of the actors that start the processes."""


class LaunchConfig(Config):
    """How `headrace rl`, `headrace sft` and `headrace dpo` run the processes, and on which hosts."""

    on: Literal["local", "nodes", "slurm", "ray"] = "local"
    """`local`: this machine. `nodes`: hosts on which `headrace node RUN` was started. `slurm`: a SLURM job. `ray`: a
    Ray cluster. All hosts must see `output_dir` under the same path."""
    trainer_nodes: int | None = Field(None, ge=1)
    """Hosts that train; unset: half of several hosts, or as many as `trainer_processes` need."""
    inference_nodes: int | None = Field(None, ge=1)
    """Hosts that sample; unset: those that do not train. With one host in all, trainer and servers share it."""
    gpus_per_node: int | None = Field(None, ge=0)
    """GPUs of each host; more are left idle, and a host with fewer neither trains nor samples. 0: CPUs alone. Unset:
    all of them."""
    spare_nodes: int = Field(0, ge=0)
    """Further hosts that are idle until they replace a lost one."""
    interface: str | None = None
    """Network interface whose address the other hosts use; unset: the one with the route to them."""
    driver_port: int = Field(0, ge=0, le=65535)
    """Port at which the launcher listens for the hosts, where `on` is `nodes`; 0: any free port."""
    join_timeout: float = Field(300.0, gt=0)
    """Seconds in which the hosts must join, where `on` is `nodes` or `slurm`. A host that does not fit is an error at
    once."""
    rejoin_timeout: float = Field(300.0, gt=0)
    """Seconds for which `headrace node` waits for a launcher that it has lost, to continue the run with; in a SLURM
    job at least until SLURM considers the launcher's host as down."""
    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    kubernetes: KubernetesConfig | None = None
    """The pods of `headrace manifest`."""
    trainer_processes: int | None = Field(None, ge=1)
    """Trainer ranks on all hosts together, each on its own GPU; unset: half of the GPUs, all of them without an
    inference server, one rank per host without GPUs."""
    inference_gpus: int | None = Field(None, ge=1)
    """GPUs for inference; unset: those that the trainer does not use. A single GPU is shared."""
    inference_servers: int | None = Field(None, ge=1)
    """Inference servers; unset: one per inference GPU, or per group of GPUs of a parallel vLLM, or one without GPUs. A
    server of the run's past policy (a teacher's `every`, or a `kl` in the reward) is one of them."""
    sharing: Literal["alternate", "overlap"] | None = None
    """How trainer and servers share a single GPU. `alternate`: the engine pauses during a training step, and frees its
    KV cache if memory is short; also on a machine without GPUs. `overlap`: both compute at once, each with a part of
    the memory. Unset: `alternate`, for evaluation during SFT `overlap`."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each rank and of each server; unset: half of the host's cores divided by their number, all of its
    cores if nothing else runs there."""
    start_timeout: float = Field(300.0, gt=0)
    """Seconds until every process must be ready, again after a restart; vLLM's `start_timeout` is added."""
    stop_timeout: float = Field(10.0, gt=0)
    """Seconds between the request to stop and the kill of a process."""
    save_on_sigterm: bool = False
    """Whether the trainer finishes its step and writes a checkpoint when SIGTERM stops the run, as at SIGUSR1: for
    machines that are taken away after a notice. A second signal stops it at once."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of all processes of the run, and of the checks before they start. Exported `WANDB_MODE` and
    `HF_HUB_OFFLINE` take precedence."""
    env_from: dict[str, str] = Field(default_factory=dict)
    """Environment variables with the value of an exported one: `HF_TOKEN = "MY_TOKEN"`; the values are not saved."""
    max_restarts: int = Field(3, ge=0)
    """Restarts of killed processes in a row, without progress of the run between them."""
    heartbeat_url: HttpUrl | None = None
    """URL to which the launcher POSTs `heartbeat.json` during the run and at its end, for a service that raises an
    alarm when heartbeats stop. Unset: none."""
    heartbeat_interval: float = Field(60.0, gt=0)
    """Seconds between heartbeats."""

    def problems(self) -> Iterator[InvalidValue]:
        for key, most in (("trainer_nodes", 1), ("inference_nodes", 1), ("spare_nodes", 0)):
            value = getattr(self, key)
            if self.on == "local" and value is not None and value > most:
                fix = 'Set launch.on to "slurm", "ray" or "nodes", or leave it out.'
                yield self.invalid(key, 'launch.on = "local" uses this machine alone', fix)

    @property
    def storage_root(self) -> Path | None:
        """The absolute storage root of the run (`storage.cache_dir`); None if it is not set."""
        root = self.env.get(CACHE_VARIABLE)
        return None if root is None else Path(root)


def set_variables(launch: LaunchConfig) -> list[str]:
    """Set the environment variables of a run file, for this process and its children. Returns notices.

    Call it before importing a library that reads them.
    """
    os.environ.update(without_exported(launch.env))
    notices = []
    for name, source in launch.env_from.items():
        if source in os.environ:
            os.environ[name] = os.environ[source]
        else:
            notices.append(f"launch.env_from.{name} = {source}: no such environment variable; {name} is not set.")
    return notices
