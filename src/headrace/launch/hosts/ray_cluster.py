"""A Ray cluster: the connection of this process to it, what a run asks of it, and what is wrong with its answer.

Ray itself is imported by `import_ray` when it is needed, which takes seconds.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.launch.errors import BadRequest

ADDRESS_KEY = "launch.ray.address"
CONNECT_TIMEOUT_S = 10.0

Bundle = dict[str, float]
"""Amounts by the names of Ray's resources, on one node."""


def check_installed() -> None:
    """Raise an error if Ray is not installed, without importing it, which takes seconds."""
    if importlib.util.find_spec("ray") is None:
        fix = "Install it: pip install 'headrace[ray]'; in a checkout `python scripts/install.py ray`."
        raise BadRequest("Ray is not installed", key="launch.on", value="ray", fix=fix)


def check_address(address: str) -> None:
    """Raise an error if no cluster listens at an address: Ray would wait for long."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        fact, fix = "not HOST:PORT", "Give the address that `ray start --head` has printed, with its port."
        raise BadRequest(fact, key=ADDRESS_KEY, value=address, fix=fix)
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        fact, fix = error.strerror or str(error), "Start the cluster with `ray start --head`, or correct the address."
        raise BadRequest(fact, key=ADDRESS_KEY, value=address, fix=fix) from error


def make_bundles(nodes: Sequence[Mapping[str, float]], count: int, gpus_per_node: int | None) -> list[Bundle]:
    """Return one bundle per host, for `count` hosts of a cluster with these resources, those with most GPUs first.

    Hosts that the cluster lacks are like its largest. A node without CPUs, as the head often is, is left out.
    """
    gpus = sorted((int(node.get("GPU", 0)) for node in nodes if node.get("CPU", 0) >= 1), reverse=True)
    wanted = [gpus_per_node] * count if gpus_per_node else [*gpus, *[max(gpus, default=0)] * count][:count]
    return [{"CPU": 1.0, "GPU": float(number)} if number else {"CPU": 1.0} for number in sorted(wanted, reverse=True)]


def describe_shortage(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float]) -> str:
    """Return what a run needs, what the cluster has and what of it is free."""
    wanted = Counter(int(bundle.get("GPU", 0)) for bundle in bundles)
    needs = ", ".join(f"{count} with {gpus} GPUs" if gpus else f"{count} with a CPU" for gpus, count in wanted.items())
    has = ", ".join(f"{node['NodeManagerHostname']} ({_amounts(node['Resources'])})" for node in nodes)
    total = sum(wanted.values())
    return f"the run needs {total} hosts ({needs}); the Ray cluster has {len(nodes)}: {has}. Free: {_amounts(free)}"


def _amounts(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"


def import_ray() -> Any:
    check_installed()
    import ray

    return ray


def connect(address: str | None, runtime_env: Mapping[str, Any]) -> bool:
    """Connect this process to a cluster, or start one on this machine. Returns whether it was not connected before."""
    ray = import_ray()
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS")
    if address is not None:
        check_address(address)
    options = {"runtime_env": dict(runtime_env), "log_to_driver": False, "logging_level": "warning"}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        try:
            ray.init(address or "auto", **options)
        except ConnectionError:
            if address is not None:
                raise
            ray.init("local", include_dashboard=False, **options)
    except (OSError, RuntimeError, ValueError) as error:
        fix = "Start this on a host of the cluster, or with `ray job submit`."
        raise BadRequest(
            f"cannot connect to the Ray cluster: {error}", key=ADDRESS_KEY, value=address, fix=fix
        ) from error
    return True


def living_nodes() -> list[dict[str, Any]]:
    return [node for node in import_ray().nodes() if node["Alive"]]
