"""The processes of a run as commands: their options, GPUs, threads, hosts and groups, from a placement."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from headrace.config.sft import OfflineConfig
from headrace.launch.hosts.base import ProcessSpec
from headrace.launch.placement import Needs, Place, Placement, Sharing
from headrace.machine import VISIBLE_GPUS_VAR
from headrace.runfile.run import RunConfig
from headrace.transport.run_dir import RunDir

TRAINER_GROUP = "trainer"
RENDEZVOUS = "--rendezvous"


def needs_of(config: RunConfig | OfflineConfig) -> Needs:
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


def has_servers(config: RunConfig | OfflineConfig) -> bool:
    """Whether the run starts inference servers of its own."""
    return not config.orchestrator.client.base_url if isinstance(config, RunConfig) else config.evaluates


def has_past_server(config: RunConfig | OfflineConfig) -> bool:
    """Whether one of the run's servers has its past policy."""
    return isinstance(config, RunConfig) and config.orchestrator.past_policy is not None


def servers_at_least(config: RunConfig | OfflineConfig) -> int:
    """Return the number of servers that a run has on a shared device."""
    return config.launch.inference_servers or needs_of(config).least_servers


def sharing_of(config: RunConfig | OfflineConfig, placement: Placement) -> Sharing | None:
    """Return how trainer and servers share a device. The trainer of an SFT run does not wait for samples."""
    return placement.sharing(config.launch.sharing, trainer_waits=isinstance(config, RunConfig))


def processes_of(
    config: RunConfig | OfflineConfig,
    run: RunDir,
    placement: Placement,
    *,
    resume: bool,
    max_running: int | None = None,
) -> list[ProcessSpec]:
    """Return the processes of a run. What others wait for starts first and stops last.

    `max_running`: requests that each server decodes together, unless configured.
    """
    sharing = sharing_of(config, placement)
    specs = []
    for place in placement.places:
        env = {**thread_env(placement.threads(place, config.launch.threads)), **gpu_env(place.gpus)}
        again = None
        if place.role == "inference":
            argv = _server(config, run, placement, place, sharing, max_running)
        elif place.role == "trainer":
            argv = _trainer(config, run, placement, place, sharing)
            again = [*argv, "--resume"]
        else:
            servers = len(config.orchestrator.client.base_url if isinstance(config, RunConfig) else ())
            servers = len(placement.servers) - has_past_server(config) or servers
            argv = _command("orchestrator", run, servers=servers if servers > 1 else None, sharing=sharing)
        group = TRAINER_GROUP if place.role == "trainer" and len(placement.trainer) > 1 else ""
        specs.append(
            ProcessSpec(
                place.name,
                again if again and resume else argv,
                env,
                service=place.role == "inference",
                restart_argv=again,
                host=place.host,
                group=group,
            )
        )
    return specs


def _server(
    config: RunConfig | OfflineConfig,
    run: RunDir,
    placement: Placement,
    place: Place,
    sharing: Sharing | None,
    max_running: int | None,
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


def _trainer(
    config: RunConfig | OfflineConfig, run: RunDir, placement: Placement, place: Place, sharing: Sharing | None
) -> list[str]:
    """Return the command of a member of the trainer's group; the port of its rendezvous is not known yet."""
    members = placement.trainer
    options: dict[str, object] = {}
    if config.launch.on != "local":
        options["host"] = placement.host(members[0].host).address
    if len(members) > 1:
        options |= {"nodes": len(members), "node-rank": place.node_rank, "rendezvous": f"{options['host']}:0"}
    ranks = place.ranks if place.ranks > 1 or len(members) > 1 else None
    return _command("trainer", run, ranks=ranks, **options, sharing=sharing)


def with_rendezvous(spec: ProcessSpec, port: int) -> ProcessSpec:
    """Return a member of the trainer's group whose ranks meet at this port of the first member's host."""

    def completed(argv: Sequence[str]) -> list[str]:
        place = list(argv).index(RENDEZVOUS) + 1
        return [*argv[:place], f"{argv[place].rpartition(':')[0]}:{port}", *argv[place + 1 :]]

    again = None if spec.restart_argv is None else completed(spec.restart_argv)
    return replace(spec, argv=completed(spec.argv), restart_argv=again)


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
