"""The processes of a run as commands, from a placement: options, GPUs, threads, hosts and groups; and its table."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from headrace.launch.hosts.base import Host, ProcessSpec
from headrace.launch.hosts.local import this_machine
from headrace.launch.placement import Needs, Place, Placement, Sharing, place
from headrace.machine import VISIBLE_GPUS_VAR, usable_cores, visible_gpus
from headrace.runfile.run import AnyRun, RunConfig
from headrace.transport.run_dir import RunDir

TRAINER_GROUP = "trainer"


def needs_of(config: AnyRun) -> Needs:
    """Return what a run asks of its hosts."""
    numbers = config.launch.model_dump(include=set(Needs.__annotations__))
    servers = has_servers(config)
    return Needs(
        **numbers,
        gpus_per_server=config.inference.gpus_per_server,
        has_servers=servers,
        has_orchestrator=servers or isinstance(config, RunConfig),
        has_past_server=has_past_server(config),
        port=config.inference.port,
    )


def has_servers(config: AnyRun) -> bool:
    """Whether the run starts inference servers of its own."""
    return not config.orchestrator.client.base_url if isinstance(config, RunConfig) else config.evaluates


def has_past_server(config: AnyRun) -> bool:
    """Whether one of the run's servers has its past policy."""
    return isinstance(config, RunConfig) and config.orchestrator.past_policy is not None


def servers_at_least(config: AnyRun) -> int:
    """Return the number of servers that a run has on a shared device."""
    return config.launch.inference_servers or needs_of(config).least_servers


def sharing_of(config: AnyRun, placement: Placement) -> Sharing | None:
    """Return how trainer and servers share a device. The trainer of an SFT run does not wait for samples."""
    return placement.sharing(config.launch.sharing, trainer_waits=isinstance(config, RunConfig))


def processes_of(
    config: AnyRun, run: RunDir, placement: Placement, *, resume: bool, max_running: int | None = None
) -> list[ProcessSpec]:
    """Return the processes of a run. What others wait for starts first and stops last.

    `max_running`: requests that each server decodes together, unless configured.
    """
    sharing = sharing_of(config, placement)
    specs = []
    for each in placement.places:
        env = {**thread_env(placement.threads(each, config.launch.threads)), **gpu_env(each.gpus)}
        again = None
        if each.role == "inference":
            argv = _server(config, run, placement, each, sharing, max_running)
        elif each.role == "trainer":
            argv = _trainer(config, run, placement, each, sharing)
            again = [*argv, "--resume"]
        else:
            servers = len(config.orchestrator.client.base_url if isinstance(config, RunConfig) else ())
            servers = len(placement.servers) - has_past_server(config) or servers
            argv = _command("orchestrator", run, servers=servers if servers > 1 else None, sharing=sharing)
        group = TRAINER_GROUP if each.role == "trainer" and len(placement.trainer) > 1 else ""
        first, is_service = again if again and resume else argv, each.role == "inference"
        specs.append(ProcessSpec(each.name, first, env, is_service, restart_argv=again, host=each.host, group=group))
    return specs


def _server(
    config: AnyRun, run: RunDir, placement: Placement, place: Place, sharing: Sharing | None, max_running: int | None
) -> list[str]:
    inference = config.inference
    options: dict[str, object] = {}
    if place.number:
        options = {"name": place.name, "port": place.port}
    if config.launch.on != "local":  # also where one host is left: others may join
        options["host"] = placement.host(place.host).address
    share = inference.memory_share(len(placement.servers)) if placement.shares_gpu else None
    if share is not None:
        options["vllm.gpu_memory_utilization"] = f"{share:g}"
    if inference.max_running is None and max_running is not None:
        options["max_running"] = max_running
    return _command("serve", run, **options, sharing=sharing)


def _trainer(config: AnyRun, run: RunDir, placement: Placement, place: Place, sharing: Sharing | None) -> list[str]:
    """Return the command of a member of the trainer's group; the port of its rendezvous is not known yet."""
    members = placement.trainer
    options: dict[str, object] = {}
    if config.launch.on != "local":
        options["host"] = placement.host(members[0].host).address
    if len(members) > 1:
        options |= {"nodes": len(members), "node-rank": place.node_rank, "rendezvous": f"{options['host']}:0"}
    ranks = place.ranks if place.ranks > 1 or len(members) > 1 else None
    return _command("trainer", run, ranks=ranks, **options, sharing=sharing)


def _command(command: str, run: RunDir, **options: object) -> list[str]:
    """Return `headrace COMMAND RUN` with the options that are not None."""
    flags = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "headrace", command, str(run.root), *flags]


def thread_env(count: int) -> dict[str, str]:
    """Return environment variables that limit every numeric library to `count` threads, which wait without spinning.

    Spinning threads take the time that another process on their cores needs; a user's own `OMP_WAIT_POLICY` is kept.
    """
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    waiting = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    return {**dict.fromkeys(pools, str(count)), **waiting, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def gpu_env(gpus: Sequence[str]) -> dict[str, str]:
    """Return environment variables that make only these GPUs visible; none on a machine without GPUs."""
    return {VISIBLE_GPUS_VAR: ",".join(gpus)} if gpus else {}


COLUMNS = ("process", "host", "GPUs", "address", "threads")


def expected_hosts(config: AnyRun) -> list[Host]:
    """Return the hosts of a run before any has joined: this machine, or the number of equal hosts that it asks for.

    Their cores are not known: those of this machine stand for them.
    """
    launch = config.launch
    if launch.on == "local":
        return [this_machine()]
    gpus = tuple(map(str, range(launch.gpus_per_node or 0)))
    names = [f"host-{number}" for number in range(1, needs_of(config).nodes + 1)]
    return [Host(name, name, gpus, usable_cores()) for name in names]


def place_here(config: AnyRun) -> Placement:
    """Place a run on this machine. Raises `ConfigError` if it does not fit."""
    return place([this_machine()], needs_of(config))


def on_this_machine(config: AnyRun) -> list[str]:
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


def describe_placement(config: AnyRun) -> list[str]:
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
