"""Launch a run on this machine and see it to its end."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from headrace.config.base import ConfigError
from headrace.config.inference import InferenceConfig
from headrace.config.launch import LaunchConfig
from headrace.config.sft import SftConfig
from headrace.errors import BadInput
from headrace.launch.errors import InputRefused, LaunchError, RestartNeeded
from headrace.launch.heartbeat import Heartbeat
from headrace.launch.hosts.local import LocalHosts, this_machine
from headrace.launch.own_code import save_folders
from headrace.launch.placement import Placement, place
from headrace.launch.processes import has_servers, needs_of, processes_of, sharing_of
from headrace.launch.run_directory import hold
from headrace.launch.saved_config import save
from headrace.launch.supervisor import MEMORY_ADVICE, Supervisor
from headrace.machine import visible_gpus
from headrace.observe.summary import summarize, text, title, write_summary
from headrace.observe.terminal import make_view
from headrace.runfile.run import RunConfig
from headrace.transport.run_dir import RunDir

LAST_PORT = 65535


def launch(
    config: RunConfig | SftConfig,
    run: RunDir,
    code_folders: Sequence[str],
    *,
    resume: bool,
    again: str,
    max_running: int | None = None,
    memory_advice: str | None = None,
) -> int:
    """Run a run to its end and return the exit code. `again` is the command that continues it.

    `max_running`: requests that each server decodes together, unless configured. `memory_advice`: what makes the run
    need less host memory.
    """
    with hold(run.root) as held:
        save(config, run)
        save_folders(code_folders, run)
        options: dict[str, Any] = {"max_running": max_running, "memory_advice": memory_advice}

        def make(resume: bool) -> Supervisor:
            if resume:
                run.weights.delete_after(run.latest_checkpoint_step())
            return make_supervisor(config, run, title(run), resume, inherited=(held,), **options)

        supervisor = make(resume)
        try:
            for _ in range(config.launch.max_restarts):
                try:
                    code = supervisor.run()
                    break
                except RestartNeeded as error:
                    print(f"headrace: {error}; starting all processes again")
                    supervisor = make(resume=True)
            else:
                code = supervisor.run()
        except InputRefused as error:
            raise LaunchError(f"{error}\nFix the named value, then continue with --resume.") from error
        except LaunchError as error:
            raise LaunchError(f"{error}\nOnce the cause is fixed, continue with: {again}") from error
        finally:
            if supervisor.history.moves:
                try:
                    write_summary(run, supervisor.history)
                except (BadInput, OSError) as error:  # the error that ended the run is more important
                    print(f"{run.summary} was not written: {error}")
    if code:
        print(f"stopped at step {supervisor.history.step}; continue with: {again}")
    else:
        print(text(run, summarize(run, supervisor.history)))
    return code


def make_supervisor(
    config: RunConfig | SftConfig,
    run: RunDir,
    title: str,
    resume: bool,
    *,
    inherited: Sequence[int] = (),
    max_running: int | None = None,
    memory_advice: str | None = None,
) -> Supervisor:
    """Return a supervisor of the run that shows its progress on the terminal."""
    assert config.max_steps is not None  # validated for both kinds of run file
    limits = config.launch
    specs = processes_of(config, run, place_here(config), resume=resume, max_running=max_running)
    view = make_view(title, config.max_steps)
    for sentence in on_this_machine(config):
        view.say(sentence)
    return Supervisor(
        specs,
        LocalHosts(inherited),
        run,
        view,
        start_timeout=start_timeout(limits, config.inference),
        stop_timeout=limits.stop_timeout,
        max_restarts=limits.max_restarts,
        heartbeat=Heartbeat(run.heartbeat, limits.heartbeat_url, limits.heartbeat_interval),
        memory_advice=memory_advice or MEMORY_ADVICE,
    )


def place_here(config: RunConfig | SftConfig) -> Placement:
    """Place a run on this machine. Raises `ConfigError` if it does not fit."""
    return place([this_machine()], needs_of(config))


def on_this_machine(config: RunConfig | SftConfig) -> list[str]:
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


def start_timeout(launch: LaunchConfig, inference: InferenceConfig) -> float:
    """Return the seconds until every process must be up. vLLM's own timeout comes first: its error names the cause."""
    return launch.start_timeout + inference.extra_start_timeout_s


def check_ports(config: RunConfig | SftConfig) -> None:
    """Raise an error if ports are in use, or GPUs are missing, before any process starts."""
    servers, inference = len(place_here(config).servers), config.inference
    host = inference.host
    if inference.port + servers - 1 > LAST_PORT:
        fact = f"{servers} servers need consecutive ports up to {LAST_PORT}"
        fix = "Lower it, or set 0 to use any free ports."
        raise ConfigError(fact, key="inference.port", value=inference.port, fix=fix)
    for port in range(inference.port, inference.port + servers) if inference.port else ():  # 0 is any free port
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise LaunchError(
                    f"cannot listen on {host}:{port}: {error.strerror}. Choose another port (0: any free port), or "
                    "stop the process that uses it."
                ) from error
