"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from headrace.launch.errors import BadRequest
from headrace.launch.ray_bundles import ADDRESS_KEY, check_address, check_installed


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
