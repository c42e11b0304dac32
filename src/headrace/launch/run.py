"""Launch a run on its hosts and see it to its end."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from shutil import rmtree
from typing import Any

import msgspec

from headrace.config.base import ConfigError
from headrace.config.launch import without_exported
from headrace.config.monitors import PrometheusConfig
from headrace.errors import BadInput
from headrace.launch.driver import Driver
from headrace.launch.errors import InputRefused, LaunchError, RestartNeeded
from headrace.launch.heartbeat import Heartbeat
from headrace.launch.hosts.base import Host, Hosts
from headrace.launch.hosts.local import LocalHosts
from headrace.launch.out_of_memory import MEMORY_ADVICE
from headrace.launch.own_code import save_folders
from headrace.launch.processes import has_servers, needs_of, on_this_machine, place_here
from headrace.launch.replacement import RunPlan
from headrace.launch.run_directory import hold
from headrace.launch.saved_config import save
from headrace.launch.supervisor import Supervisor
from headrace.observe.grafana import dashboard
from headrace.observe.prometheus import exporting
from headrace.observe.summary import format_summary, run_title, summarize, write_summary
from headrace.observe.terminal import make_view
from headrace.runfile.run import AnyRun, RunConfig
from headrace.transport.announcements import announcements
from headrace.transport.epochs import LAUNCHER_VAR
from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RunDir

LAST_PORT = 65535


def launch(
    config: AnyRun,
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
    with hold(run.root) as held, ExitStack() as stack:
        save(config, run)
        save_folders(code_folders, run)
        hosts, driver = open_hosts(config, run, (held,))
        stack.callback(driver.close)
        stack.callback(hosts.close)
        options: dict[str, Any] = {"max_running": max_running, "memory_advice": memory_advice}
        listed = hosts.wait_until_ready()
        if config.launch.on != "local":  # other hosts learn of withdrawn endpoints
            stack.enter_context(announcements(run.root, driver.env))

        def make(resume: bool) -> Supervisor:
            if resume:
                run.weights.delete_after(run.latest_checkpoint_step())
            supervisor = make_supervisor(config, run, run_title(run), hosts, listed, resume=resume, **options)
            driver.on_scale, driver.notify = supervisor.scale, supervisor.say
            return supervisor

        supervisor = make(resume)
        stack.enter_context(_exporting(config.prometheus, run, lambda: supervisor.metric_lines()))
        try:
            for _ in range(config.launch.max_restarts):
                try:
                    code = supervisor.run()
                    break
                except RestartNeeded as error:
                    print(f"headrace: {error}; starting all processes again")
                    listed = hosts.list()
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
        print(format_summary(run, summarize(run, supervisor.history)))
    return code


@contextmanager
def _exporting(config: PrometheusConfig | None, run: RunDir, lines: Callable[[], Iterator[str]]) -> Iterator[None]:
    """Serve the launcher's metrics, write the dashboard, and delete the addresses that killed processes leave."""
    if config is None or not config.enabled:
        yield
        return
    rmtree(run.prometheus_targets, ignore_errors=True)
    write_atomically(run.grafana_dashboard, msgspec.json.format(msgspec.json.encode(dashboard())))
    try:
        with exporting(config, run, "launcher", lines):
            yield
    finally:
        rmtree(run.prometheus_targets, ignore_errors=True)


def open_hosts(config: AnyRun, run: RunDir, inherited: Sequence[int] = ()) -> tuple[Hosts, Driver]:
    """Return the hosts of a run, and its driver; local processes inherit the `inherited` descriptors."""
    if config.launch.on == "local":
        return LocalHosts(inherited), Driver(run, is_alone=True)
    module = import_module(f"headrace.launch.hosts.{config.launch.on}")
    hosts = module.open_hosts(config.launch, run, needs_of(config))
    return hosts, hosts.driver


def make_supervisor(
    config: AnyRun,
    run: RunDir,
    title: str,
    hosts: Hosts,
    listed: Sequence[Host],
    *,
    resume: bool,
    max_running: int | None = None,
    memory_advice: str | None = None,
) -> Supervisor:
    """Return a supervisor of the run on the `listed` hosts that shows its progress on the terminal."""
    assert config.max_steps is not None  # validated for both kinds of run file
    limits = config.launch
    env = {} if limits.on == "local" else exported(config)
    plan = RunPlan(config, run, listed, resume=resume, max_running=max_running, env=env)
    view = make_view(title, config.max_steps)
    places = ", ".join(f"{place.name} on {place.host}" for place in plan.placement.places)
    for sentence in on_this_machine(config) if limits.on == "local" else [places]:
        view.say(sentence)
    return Supervisor(
        plan,
        hosts,
        run,
        view,
        # vLLM's own timeout comes first: its error names the cause.
        start_timeout=limits.start_timeout + config.inference.extra_start_timeout_s,
        stop_timeout=limits.stop_timeout,
        max_restarts=limits.max_restarts,
        heartbeat=Heartbeat(run.heartbeat, limits.heartbeat_url, limits.heartbeat_interval),
        memory_advice=memory_advice or MEMORY_ADVICE,
        save_on_sigterm=limits.save_on_sigterm,
    )


def exported(config: AnyRun) -> dict[str, str]:
    """Return the variables of all processes that other hosts do not inherit: those of the run file, and keys.

    The keys of the run's own servers are made here unless they are exported.
    """
    launch, inference = config.launch, config.inference
    keys = {inference.api_key_var, inference.admin_key_var}
    if has_servers(config):
        for name in keys:
            os.environ.setdefault(name, secrets.token_urlsafe(32))
    if isinstance(config, RunConfig):
        keys |= {config.orchestrator.client.api_key_var, config.orchestrator.client.admin_key_var}
    inherited = {name: os.environ[name] for name in (*launch.env_from, *keys, LAUNCHER_VAR) if name in os.environ}
    return {**without_exported(launch.env), **inherited}


def check_ports(config: AnyRun) -> None:
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
