"""The placement of a run as a table: on this machine, or on the hosts that its run file asks for."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config.sft import OfflineConfig
from headrace.launch.hosts.base import Host
from headrace.launch.hosts.local import this_machine
from headrace.launch.placement import Place, Placement, place
from headrace.launch.processes import has_servers, needs_of, sharing_of
from headrace.machine import usable_cores, visible_gpus
from headrace.runfile.run import RunConfig

COLUMNS = ("process", "host", "GPUs", "address", "threads")


def expected_hosts(config: RunConfig | OfflineConfig) -> list[Host]:
    """Return the hosts of a run before any has joined: this machine, or the number of equal hosts that it asks for.

    Their cores are not known: those of this machine stand for them.
    """
    launch = config.launch
    if launch.on == "local":
        return [this_machine()]
    gpus = tuple(map(str, range(launch.gpus_per_node or 0)))
    names = [f"host-{number}" for number in range(1, needs_of(config).nodes + 1)]
    return [Host(name, name, gpus, usable_cores()) for name in names]


def place_here(config: RunConfig | OfflineConfig) -> Placement:
    """Place a run on this machine. Raises `ConfigError` if it does not fit."""
    return place([this_machine()], needs_of(config))


def on_this_machine(config: RunConfig | OfflineConfig) -> list[str]:
    """Describe how the run uses the GPUs of this machine."""
    if isinstance(config, RunConfig) and not has_servers(config):
        where = ", ".join(config.orchestrator.client.base_url)
        return [f"no inference server is started; using {where}"]
    if not visible_gpus() or not has_servers(config):
        return []
    placement = place_here(config)
    sharing = sharing_of(config, placement)
    if sharing is None:
        sampling = sum(len(server.gpus) for server in placement.servers)
        return [f"{placement.ranks} GPUs train and {sampling} sample"]
    how = "in turns" if sharing == "alternate" else "at the same time"
    return [f"trainer and engine share one GPU, {how} (launch.sharing = {sharing})"]


def describe_placement(config: RunConfig | OfflineConfig) -> list[str]:
    """Return the table, and what is idle. Raises `ConfigError` if the run does not fit on the expected hosts."""
    hosts = expected_hosts(config)
    lines = table(place(hosts, needs_of(config)), config.launch.threads)
    if config.launch.on == "local":
        return lines
    each = f"{len(hosts[0].gpus)} GPUs each" if hosts[0].gpus else "no GPU (launch.gpus_per_node is not set)"
    size = f"{len(hosts)} hosts with" if len(hosts) > 1 else "a host with"
    return [f"assumed: {size} {each}, and as many cores as this machine", *lines]


def table(placement: Placement, threads: int | None = None) -> list[str]:
    """Return the lines of the table. `threads`: `launch.threads`."""
    rows = [COLUMNS, *(_row(placement, place, threads) for place in placement.places)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for host, gpus in placement.idle.items():
        what = f"GPUs {','.join(gpus)} of {host}" if placement.on(host) else f"{host} (spare)"
        lines.append(f"idle: {what}")
    return lines


def _row(placement: Placement, place: Place, threads: int | None) -> Sequence[str]:
    leads = len(placement.trainer) > 1 and place == placement.trainer[0]  # the ranks meet at its host
    listens = leads or place.role == "inference"
    address = f"{placement.host(place.host).address}:{place.port or '(any)'}" if listens else "-"
    number = placement.threads(place, threads)
    each = f"{place.ranks} x {number}" if place.ranks > 1 else str(number)
    return place.name, place.host, ",".join(place.gpus) or "-", address, each
