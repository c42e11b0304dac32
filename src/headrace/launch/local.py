"""A run on this machine: which processes it needs, how many threads each gets, and what is said at the end."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence, Sized

from headrace.config.base import ConfigError
from headrace.config.inference import InferenceConfig
from headrace.config.launch import LaunchConfig
from headrace.config.sft import SftConfig
from headrace.errors import BadInput
from headrace.launch.errors import InputRefused, LaunchError
from headrace.launch.heartbeat import Heartbeat
from headrace.launch.own_code import save_folders
from headrace.launch.placement import Placement, Sharing, place, place_trainer, seeing
from headrace.launch.process import ProcessSpec
from headrace.launch.run_directory import hold
from headrace.launch.saved_config import save
from headrace.launch.supervisor import Supervisor
from headrace.machine import visible_gpus
from headrace.observe.history import History
from headrace.observe.summary import summary_of, text, title, write_summary
from headrace.observe.terminal import make_view
from headrace.runfile.run import RunConfig
from headrace.transport.run_dir import RunDir

LAST_PORT = 65535


def launch(config: RunConfig | SftConfig, run: RunDir, code_folders: Sequence[str], *, resume: bool, again: str) -> int:
    """Launch a run and see it through; returns the exit code. `again` is the command that would continue it."""
    with hold(run.root) as held:
        save(config, run)
        save_folders(code_folders, run)
        supervisor = make_supervisor(config, run, title(run), resume, inherited=(held,))
        try:
            code = supervisor.run()
        except InputRefused as error:
            raise LaunchError(f"{error}\nFix the value that it names, then continue with --resume.") from error
        except LaunchError as error:
            raise LaunchError(f"{error}\nOnce the cause is fixed, continue with: {again}") from error
        finally:
            if supervisor.history.moves:
                _try_to_sum_up(run, supervisor.history)
    if code:
        print(f"stopped at step {supervisor.history.step}; continue with: {again}")
    else:
        print(text(run, summary_of(run, supervisor.history)))
    return code


def _try_to_sum_up(run: RunDir, history: History) -> None:
    """Why the run ended is more important than why there is no summary of it."""
    try:
        write_summary(run, history)
    except (BadInput, OSError) as error:
        print(f"{run.summary} is not written: {error}")


def make_supervisor(
    config: RunConfig | SftConfig, run: RunDir, title: str, resume: bool, inherited: Sequence[int] = ()
) -> Supervisor:
    """The supervisor of this kind of run, with a view of it."""
    assert config.max_steps is not None  # both kinds refuse a run without an end
    limits = config.launch
    specs = processes_of(config, run, resume)
    view = make_view(title, config.max_steps)
    for sentence in on_this_machine(config):
        view.say(sentence)
    return Supervisor(
        specs,
        run,
        view,
        start_timeout=start_timeout(limits, config.inference),
        stop_timeout=limits.stop_timeout,
        max_restarts=limits.max_restarts,
        inherited=inherited,
        heartbeat=Heartbeat(run.heartbeat, limits.heartbeat_url, limits.heartbeat_interval),
    )


def processes_of(config: RunConfig | SftConfig, run: RunDir, resume: bool) -> list[ProcessSpec]:
    """In the order they start."""
    limits = config.launch
    if has_servers(config):
        return processes(limits, config.inference, run, resume, trainer_waits=isinstance(config, RunConfig))
    ranks, gpus = place_trainer(visible_gpus(), limits.trainer_processes)
    trainer = trainer_process(run, ranks, gpus, limits.threads, resume, alone=isinstance(config, SftConfig))
    if isinstance(config, SftConfig):
        return [trainer]
    return [trainer, orchestrator_process(run, config.orchestrator.client.base_url, None)]


def has_servers(config: RunConfig | SftConfig) -> bool:
    """Whether it samples from engines of its own, rather than from none, or from some that run elsewhere."""
    return not config.orchestrator.client.base_url if isinstance(config, RunConfig) else config.evaluates


def on_this_machine(config: RunConfig | SftConfig) -> list[str]:
    """What of the run depends on the GPUs that are here."""
    if isinstance(config, RunConfig) and not has_servers(config):
        where = ", ".join(config.orchestrator.client.base_url)
        return [f"no server is started here: the engines are at {where}"]
    if not visible_gpus() or not has_servers(config):
        return []
    placement = placement_of(config.launch, config.inference)
    sharing = placement.sharing(config.launch.sharing, trainer_waits=isinstance(config, RunConfig))
    if sharing is None:
        sampling = sum(map(len, placement.inference))
        return [f"{len(placement.trainer)} GPUs train and {sampling} sample"]
    how = "in turns" if sharing == "alternate" else "at the same time"
    return [f"one GPU: trainer and engine compute on it {how} (launch.sharing = {sharing})"]


def start_timeout(launch: LaunchConfig, inference: InferenceConfig) -> float:
    """Seconds until every process must be up. vLLM has its own on top: its server gives up first, and says why."""
    return launch.start_timeout + inference.extra_start_timeout_s


def processes(
    launch: LaunchConfig, inference: InferenceConfig, run: RunDir, resume: bool, *, trainer_waits: bool = True
) -> list[ProcessSpec]:
    """Of a run that samples, in the order they start: what others wait for comes first, and stops last.

    `trainer_waits` is whether the trainer trains on what is sampled.
    """
    placement = placement_of(launch, inference)
    servers = placement.inference
    sharing = placement.sharing(launch.sharing, trainer_waits=trainer_waits)
    options = [*_memory_options(inference, placement), *_told(sharing)]
    return [
        *(
            server_process(run, number, len(servers), gpus, inference.port, launch.threads, options)
            for number, gpus in enumerate(servers)
        ),
        trainer_process(run, placement.trainer_processes, placement.trainer, launch.threads, resume, sharing),
        orchestrator_process(run, servers, sharing),
    ]


def placement_of(launch: LaunchConfig, inference: InferenceConfig) -> Placement:
    """Where the processes of a run that samples go on this machine."""
    return place(
        visible_gpus(),
        trainer_processes=launch.trainer_processes,
        inference_gpus=launch.inference_gpus,
        inference_servers=launch.inference_servers,
        gpus_per_server=inference.gpus_per_server,
    )


def _memory_options(inference: InferenceConfig, placement: Placement) -> list[str]:
    """Return the options that limit vLLM's memory on a GPU that it shares with the trainer."""
    share = inference.memory_share(len(placement.inference)) if placement.shares_gpu else None
    return [] if share is None else ["--vllm.gpu_memory_utilization", f"{share:g}"]


def server_process(
    run: RunDir,
    number: int,
    count: int,
    gpus: Sequence[str],
    port: int,
    cores: int | None,
    options: Sequence[str] = (),
) -> ProcessSpec:
    """Server `number` of `count`. Those after the first listen on the ports after the first one's."""
    name = f"inference-{number}" if number else "inference"
    more = ["--name", name, "--port", str(port and port + number)] if number else []
    environment = {**threads(cores or max(1, half_the_cores() // count)), **seeing(gpus)}
    return ProcessSpec(name, _headrace("serve", str(run.root), *more, *options), environment, service=True)


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
    """The trainer, of an RL run or an SFT run. The others need no word to continue.

    `alone`: nothing else of the run computes, so the ranks use every core.
    """
    first = _headrace("trainer", str(run.root), *_option("--ranks", range(ranks)), *_told(sharing))
    again = [*first, "--resume"]
    shared = usable_cores() if alone else half_the_cores()
    environment = {**threads(cores or max(1, shared // ranks)), **seeing(gpus)}
    if alone and "OMP_WAIT_POLICY" not in os.environ:  # spinning threads are slow when another program needs a core
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    return ProcessSpec("trainer", again if resume else first, environment, restart_argv=again)


def orchestrator_process(run: RunDir, servers: Sized, sharing: Sharing | None) -> ProcessSpec:
    """It begins once that many servers are up."""
    argv = _headrace("orchestrator", str(run.root), *_option("--servers", servers), *_told(sharing))
    return ProcessSpec("orchestrator", argv, threads(1))


def _option(name: str, several: Sized) -> list[str]:
    """How many there are, where there is more than the one that everybody expects."""
    return [name, str(len(several))] if len(several) > 1 else []


def _told(sharing: Sharing | None) -> list[str]:
    """How the other side on the same device, if there is one, is to be dealt with."""
    return [] if sharing is None else ["--sharing", sharing]


def _headrace(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headrace", *arguments]


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def half_the_cores() -> int:
    """Return the threads of a process that computes beside another.

    Threads spin while they wait for each other, so that one core busy elsewhere stalls all.
    """
    return max(1, usable_cores() // 2)


def threads(count: int) -> dict[str, str]:
    """Environment that keeps every numeric library of a process to `count` threads."""
    pools = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    return {**{name: str(count) for name in pools}, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def check_ports(launch: LaunchConfig, inference: InferenceConfig) -> None:
    """Refuse ports that are taken, and GPUs that are not there, before anything is started."""
    servers = len(placement_of(launch, inference).inference)
    if inference.port + servers - 1 > LAST_PORT:
        raise ConfigError(
            f"{servers} servers take the ports from there on, and the last one is {LAST_PORT}",
            key="inference.port",
            value=inference.port,
            fix="Lower it, or set it to 0 for free ports.",
        )
    for number in range(servers if inference.port else 0):  # 0 is any free one
        check_port(inference.host, inference.port + number)


def check_port(host: str, port: int) -> None:
    """Refuse a port that is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LaunchError(
                f"cannot listen on {host}:{port}: {error.strerror}. Choose another port (0 takes any free one), "
                "or end the process that uses it"
            ) from error
