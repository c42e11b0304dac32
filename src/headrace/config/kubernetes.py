"""`[launch.kubernetes]`: the pods of a run and what they get from the cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace.config.base import Config

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
