"""Launch a run on this machine: its processes, their GPUs, ports and threads."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal

from headrace.config.base import ConfigError
from headrace.config.inference import InferenceConfig
from headrace.config.launch import LaunchConfig
from headrace.config.sft import SftConfig
from headrace.errors import BadInput
from headrace.launch.errors import InputRefused, LaunchError, RestartNeeded
from headrace.launch.heartbeat import Heartbeat
from headrace.launch.hosts.base import ProcessSpec
from headrace.launch.hosts.local import LocalHosts
from headrace.launch.own_code import save_folders
from headrace.launch.run_directory import hold
from headrace.launch.saved_config import save
from headrace.launch.supervisor import MEMORY_ADVICE, Supervisor
from headrace.machine import VISIBLE_GPUS_VAR, usable_cores, visible_gpus
from headrace.observe.summary import summarize, text, title, write_summary
from headrace.observe.terminal import make_view
from headrace.runfile.run import RunConfig
from headrace.transport.run_dir import RunDir

LAST_PORT = 65535
PARALLEL = "inference.vllm tensor_parallel_size * data_parallel_size"
"""The keys that make a server take several GPUs."""

Sharing = Literal["alternate", "overlap"]
"""How trainer and servers use one GPU: in turns, or at the same time."""


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
    limits, specs = config.launch, processes_of(config, run, resume, max_running)
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


def processes_of(
    config: RunConfig | SftConfig, run: RunDir, resume: bool, max_running: int | None = None
) -> list[ProcessSpec]:
    """Return the processes of a run in the order in which they start."""
    limits = config.launch
    if has_servers(config):
        waits = isinstance(config, RunConfig)
        return processes(limits, config.inference, run, resume, trainer_waits=waits, max_running=max_running)
    ranks, gpus = place_trainer(visible_gpus(), limits.trainer_processes)
    trainer = trainer_process(run, ranks, gpus, limits.threads, resume, alone=isinstance(config, SftConfig))
    if isinstance(config, SftConfig):
        return [trainer]
    return [trainer, orchestrator_process(run, config.orchestrator.client.base_url, None)]


def layout_of(config: RunConfig | SftConfig) -> tuple[Placement, Sharing | None]:
    """Return the devices of a run's processes on this machine, and how trainer and servers share one."""
    if has_servers(config):
        placement = placement_of(config.launch, config.inference)
        return placement, placement.sharing(config.launch.sharing, trainer_waits=isinstance(config, RunConfig))
    ranks, gpus = place_trainer(visible_gpus(), config.launch.trainer_processes)
    return Placement(ranks, gpus, ()), None


def has_servers(config: RunConfig | SftConfig) -> bool:
    """Whether the run starts inference servers of its own."""
    return not config.orchestrator.client.base_url if isinstance(config, RunConfig) else config.evaluates


def on_this_machine(config: RunConfig | SftConfig) -> list[str]:
    """Describe how the run uses the GPUs of this machine."""
    if isinstance(config, RunConfig) and not has_servers(config):
        where = ", ".join(config.orchestrator.client.base_url)
        return [f"no inference server is started; using {where}"]
    if not visible_gpus() or not has_servers(config):
        return []
    placement, sharing = layout_of(config)
    if sharing is None:
        sampling = sum(map(len, placement.inference))
        return [f"{len(placement.trainer)} GPUs train and {sampling} sample"]
    how = "in turns" if sharing == "alternate" else "at the same time"
    return [f"trainer and engine share one GPU, {how} (launch.sharing = {sharing})"]


def start_timeout(launch: LaunchConfig, inference: InferenceConfig) -> float:
    """Return the seconds until every process must be up. vLLM's own timeout comes first: its error names the cause."""
    return launch.start_timeout + inference.extra_start_timeout_s


def processes(
    launch: LaunchConfig,
    inference: InferenceConfig,
    run: RunDir,
    resume: bool,
    *,
    trainer_waits: bool = True,
    max_running: int | None = None,
) -> list[ProcessSpec]:
    """Return the processes of a run with servers. What others wait for starts first and stops last.

    `trainer_waits` is whether the trainer waits for samples. Server number n listens on the configured port + n.
    """
    placement = placement_of(launch, inference)
    servers = placement.inference
    sharing = placement.sharing(launch.sharing, trainer_waits=trainer_waits)
    share = inference.memory_share(len(servers)) if placement.shares_gpu else None
    specs = []
    for number, gpus in enumerate(servers):
        name = f"inference-{number}" if number else "inference"
        own = {"name": name, "port": inference.port and inference.port + number} if number else {}
        planned = {} if share is None else {"vllm.gpu_memory_utilization": f"{share:g}"}
        if inference.max_running is None and max_running is not None:
            planned["max_running"] = str(max_running)
        command = _command("serve", run, **own, **planned, sharing=sharing)
        environment = {**thread_env(launch.threads or max(1, half_the_cores() // len(servers))), **gpu_env(gpus)}
        specs.append(ProcessSpec(name, command, environment, service=True))
    trainer = trainer_process(run, placement.trainer_processes, placement.trainer, launch.threads, resume, sharing)
    return [*specs, trainer, orchestrator_process(run, servers, sharing)]


def placement_of(launch: LaunchConfig, inference: InferenceConfig) -> Placement:
    """Assign the visible GPUs to the processes of a run with servers."""
    numbers = launch.model_dump(include={"trainer_processes", "inference_gpus", "inference_servers"})
    return place(visible_gpus(), **numbers, gpus_per_server=inference.gpus_per_server)


def trainer_process(
    run: RunDir,
    ranks: int,
    gpus: Sequence[str],
    cores: int | None,
    resume: bool,
    sharing: Sharing | None = None,
    *,
    alone: bool = False,
) -> ProcessSpec:
    """Return the process of the trainer. Only the trainer needs an option to resume.

    `alone`: no other process of the run computes, so that the ranks use all cores.
    """
    first = _command("trainer", run, ranks=ranks if ranks > 1 else None, sharing=sharing)
    again = [*first, "--resume"]
    shared = usable_cores() if alone else half_the_cores()
    environment = {**thread_env(cores or max(1, shared // ranks)), **gpu_env(gpus)}
    return ProcessSpec("trainer", again if resume else first, environment, restart_argv=again)


def orchestrator_process(run: RunDir, servers: Sized, sharing: Sharing | None) -> ProcessSpec:
    """Return the process of the orchestrator, which waits for all servers."""
    count = len(servers) if len(servers) > 1 else None
    return ProcessSpec("orchestrator", _command("orchestrator", run, servers=count, sharing=sharing), thread_env(1))


def _command(command: str, run: RunDir, **options: object) -> list[str]:
    """Return `headrace COMMAND RUN` with the options that are not None."""
    flags = [text for name, value in options.items() if value is not None for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "headrace", command, str(run.root), *flags]


def half_the_cores() -> int:
    """Return the number of threads of a process that computes beside another one.

    OpenMP's threads wait for each other, so that one busy core would stall all of them.
    """
    return max(1, usable_cores() // 2)


def thread_env(count: int) -> dict[str, str]:
    """Return environment variables that limit every numeric library to `count` threads, which wait without spinning.

    Spinning threads take the time that another process on their cores needs; a user's own `OMP_WAIT_POLICY` is kept.
    """
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    waiting = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    return {**dict.fromkeys(pools, str(count)), **waiting, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def check_ports(launch: LaunchConfig, inference: InferenceConfig) -> None:
    """Raise an error if ports are in use, or GPUs are missing, before any process starts."""
    servers, host = len(placement_of(launch, inference).inference), inference.host
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


@dataclass(frozen=True)
class Placement:
    """The GPUs of the trainer and of each server in `inference`; empty on a machine without GPUs."""

    trainer_processes: int
    trainer: Sequence[str]
    inference: Sequence[Sequence[str]]

    @property
    def shares_gpu(self) -> bool:
        """Whether a server samples on a GPU of the trainer."""
        return any(gpu in self.trainer for gpus in self.inference for gpu in gpus)

    def sharing(self, wanted: Sharing | None, *, trainer_waits: bool) -> Sharing | None:
        """Return how one rank and the servers share their device, or None. Alternation needs a trainer that waits."""
        if self.shares_gpu:
            return wanted or ("alternate" if trainer_waits else "overlap")
        on_cpus = not self.trainer and self.trainer_processes == 1
        return wanted if on_cpus and wanted == "alternate" else None


def place(
    gpus: Sequence[str],
    *,
    trainer_processes: int | None,
    inference_gpus: int | None,
    inference_servers: int | None,
    gpus_per_server: int = 1,
) -> Placement:
    """Divide GPUs between trainer and servers; unset numbers are chosen so that each gets half.

    All processes share a single GPU. On a machine without GPUs only the numbers of processes matter.
    """
    each = gpus_per_server
    if not gpus:
        if inference_gpus:
            fact = "no GPU is visible on this machine"
            raise ConfigError(fact, key="launch.inference_gpus", value=inference_gpus, fix="Leave it out.")
        return Placement(trainer_processes or 1, (), [()] * (inference_servers or 1))
    if len(gpus) == 1:
        if each > 1:
            raise ConfigError(f"a server takes {each} GPUs, but one is visible", key=PARALLEL, fix="Lower it to 1.")
        if (trainer_processes or 1) > 1 or (inference_gpus or 1) > 1:
            fix = "Set trainer_processes and inference_gpus to 1, or leave them out."
            raise ConfigError("one GPU is visible, which trainer and inference share", key="launch", fix=fix)
        return Placement(1, gpus, [gpus] * (inference_servers or 1))
    if inference_gpus:
        sampling = inference_gpus
    elif trainer_processes is not None:  # what the trainer leaves, in whole servers
        sampling = (len(gpus) - trainer_processes) // each * each
    else:
        sampling = max(1, len(gpus) // 2 // each) * each
    training = trainer_processes or len(gpus) - sampling
    if sampling < 1 or training < 1 or sampling + training > len(gpus):
        detail = f" ({PARALLEL}: a server takes {each})" if each > 1 else ""
        raise ConfigError(
            f"{training} trainer_processes and {sampling} inference_gpus need a GPU each, but {len(gpus)} are visible",
            key="launch",
            fix=f"Lower one of them{detail}.",
        )
    if sampling % each:
        fact = f"a server takes {each} GPUs ({PARALLEL})"
        raise ConfigError(fact, key="launch.inference_gpus", value=sampling, fix=f"Set it to a multiple of {each}.")
    if inference_servers not in (None, sampling // each):
        fact = f"{sampling} inference_gpus make {sampling // each} servers of {each} GPUs each"
        raise ConfigError(fact, key="launch.inference_servers", value=inference_servers, fix="Leave it out.")
    servers = [gpus[first : first + each] for first in range(0, sampling, each)]
    return Placement(training, gpus[sampling : sampling + training], servers)


def place_trainer(gpus: Sequence[str], trainer_processes: int | None) -> tuple[int, Sequence[str]]:
    """Return the number of ranks of a trainer without servers, and their GPUs; default: one rank per GPU."""
    if gpus and trainer_processes is not None and trainer_processes > len(gpus):
        fact = f"each needs a GPU, but {len(gpus)} are visible"
        fix = f"Lower it to {len(gpus)}, or leave it out."
        raise ConfigError(fact, key="launch.trainer_processes", value=trainer_processes, fix=fix)
    ranks = trainer_processes or max(1, len(gpus))
    return ranks, gpus[:ranks]


def gpu_env(gpus: Sequence[str]) -> dict[str, str]:
    """Return environment variables that make only these GPUs visible; none on a machine without GPUs."""
    return {VISIBLE_GPUS_VAR: ",".join(gpus)} if gpus else {}
