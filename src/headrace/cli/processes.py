"""`headrace orchestrator` and `headrace trainer`: start one process of a run, as the launcher does."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from headrace.cli.common import add_resume
from headrace.cli.main import explain
from headrace.config.dpo import DpoConfig
from headrace.config.sft import OfflineConfig
from headrace.config.trainer import TrainingConfig
from headrace.environments.isolation import SandboxSettings, apply_settings
from headrace.errors import SAVED, Repaired
from headrace.inference.memory import ColocatedEngines
from headrace.inference.model_shape import adapter_share
from headrace.launch.errors import BadRequest, naming_run
from headrace.launch.own_code import add_code_folders_of
from headrace.launch.process import PARENT_VAR, stop_with_launcher
from headrace.launch.processes import servers_at_least
from headrace.launch.run_directory import LATEST, plan_directory
from headrace.launch.saved_config import read_run, read_sampled_run, run_directory
from headrace.machine import frozen_imports, keep_compiled_kernels
from headrace.observe.prometheus import exporting_records
from headrace.observe.status import Status, is_up, setup_logging
from headrace.observe.tracing import tracing
from headrace.runfile.run import AnyRun, RunConfig
from headrace.text import import_renderers
from headrace.text.hub import model_directory
from headrace.transport.announcements import announcements
from headrace.transport.epochs import hold_epoch
from headrace.transport.run_dir import RunDir

RANKS_VAR = "HEADRACE_RANKS"
"""The folder in which each rank of this host creates a file named by its process id, once it can stop in order."""
STOPPED = 143
"""The exit code that a shell reports for a process that SIGTERM has ended."""


@contextmanager
def process(name: str, run: RunDir) -> Iterator[Status]:
    """Set up logging, lifeline and status file of a run's process; the status file says at the end how it ended.

    The status file of the first rank is that of the trainer; other ranks have theirs in a subfolder.
    """
    rank = int(os.environ.get("RANK", "0"))
    setup_logging(f"rank {rank}" if rank else "")
    stop_with_launcher()
    add_code_folders_of(run)
    with naming_run(run.root), announcements(run.root):
        run.create_directories()
        status = Status(run.status / "ranks", f"{name}-{rank}") if rank else Status(run.status, name)
        try:
            yield status
        except BaseException as error:
            if isinstance(error, Repaired) and not rank:
                status.notify(str(error))
            explanation = explain(error)
            status.close("failed", explanation.message if explanation is not None else status.current.problem)
            raise
        status.close("finished")


class StopRequest:
    """Set by SIGTERM or SIGINT. A second signal ends the process at once, as does the first one during start-up.

    During start-up, while libraries and the model are loaded, the request is not polled and nothing can be lost.
    SIGUSR1 asks for a stop after the step, with a checkpoint.
    """

    def __init__(self, status: Status) -> None:
        self.stopped, self.save_and_stop = threading.Event(), threading.Event()
        self.exit_code = 0
        self._status = status
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        if folder := os.environ.get(RANKS_VAR):
            Path(folder, str(os.getpid())).touch()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.exit_code = 0 if RANKS_VAR in os.environ else SAVED  # the parent of ranks reports it for them
            self.save_and_stop.set()
        else:
            self.exit_code = 128 + number
            self.stopped.set()
            signal.signal(number, signal.SIG_DFL)
        if not is_up(self._status.current):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def configure_orchestrator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory, or its config.toml")
    parser.add_argument("--servers", metavar="N", type=int, default=1, help="inference servers to wait for (default 1)")
    parser.add_argument(
        "--sharing", choices=("alternate", "overlap"), help="servers and trainer are on one device: in turns, or not"
    )


def run_orchestrator(arguments: argparse.Namespace) -> int:
    with frozen_imports():
        import_renderers()
        from headrace.observe.monitors import forwarding
        from headrace.orchestrator import main
        from headrace.orchestrator.shutdown import CANCEL_GRACE_S

    config = read_sampled_run(arguments.run)
    run = run_directory(config)
    orchestrator = config.orchestrator if isinstance(config, RunConfig) else config.evaluator()
    apply_settings(SandboxSettings(**config.environments.sandbox.model_dump()))
    with (
        process("orchestrator", run) as status,
        exporting_records(config.prometheus, run, status),
        tracing(config.otel, run, "orchestrator"),
        forwarding(run, config.wandb, config.tensorboard, config.trackio),
    ):
        shares_device = arguments.sharing == "alternate"
        over = main.run(orchestrator, run=run, status=status, servers=arguments.servers, shares_device=shares_device)
    # The exit code distinguishes the end of the run from a requested stop.
    code = 0 if over else STOPPED
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(CANCEL_GRACE_S)
            if thread.is_alive():
                # User code left it behind, and everything that matters is on disk.
                logging.shutdown()
                sys.stdout.flush()
                os._exit(code)
    return code


def configure_trainer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory, or its config.toml")
    parser.add_argument("--ranks", metavar="N", type=int, default=1, help="processes on this host (default 1)")
    parser.add_argument("--nodes", metavar="K", type=int, default=1, help="hosts that train together (default 1)")
    parser.add_argument("--node-rank", metavar="I", type=int, default=0, help="number of this host, from 0")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="a free port of host 0, for --nodes")
    parser.add_argument("--host", metavar="ADDRESS", help="address at which engines reach host 0 (weights over a link)")
    parser.add_argument(
        "--sharing", choices=("alternate", "overlap"), help="the run's servers are on the same device: in turns, or not"
    )
    add_resume(parser)


def run_trainer(arguments: argparse.Namespace) -> int:
    ranks = arguments.ranks * arguments.nodes
    if arguments.sharing is not None and max(ranks, int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        fact = "only a single rank can share its device with servers"
        raise BadRequest(fact, key="--sharing", value=arguments.sharing, fix="Leave out --sharing, or start one rank.")
    if arguments.nodes > 1 and not re.fullmatch(r".+:\d+", arguments.rendezvous or ""):
        fact, fix = "hosts that train together need a common address", "Give HOST:PORT of host 0."
        raise BadRequest(fact, key="--rendezvous", value=arguments.rendezvous, fix=fix)
    if not 0 <= arguments.node_rank < arguments.nodes:
        fix = f"Use a number from 0 to {arguments.nodes - 1}."
        raise BadRequest(f"there are {arguments.nodes} --nodes", key="--node-rank", value=arguments.node_rank, fix=fix)
    keep_compiled_kernels()
    config = read_run(arguments.run)
    run = run_directory(config)
    resume = _check_resume(run.root, arguments.resume)
    if ranks > 1:
        return _run_ranks(arguments, resume)
    from headrace.observe.monitors import forwarding

    engines = colocated_engines(config, arguments.sharing) if arguments.sharing else None
    is_first = os.environ.get("RANK", "0") == "0"
    # An orchestrator, if there is one, forwards the metrics, because it ends last.
    forwards = is_first and isinstance(config, OfflineConfig) and not config.evaluates
    monitors = (config.wandb, config.tensorboard, config.trackio) if forwards else (None, None, None)
    with (
        hold_epoch(run.root, "trainer") if is_first else nullcontext(),
        process("trainer", run) as status,
        exporting_records(config.prometheus, run, status),
        forwarding(run, *monitors),
    ):
        request = StopRequest(status)
        stops: dict[str, Any] = {"stopped": request.stopped, "save_and_stop": request.save_and_stop}
        if isinstance(config, RunConfig):
            with frozen_imports():
                from headrace.trainer.rl import RlTrainer

            if arguments.host is not None:
                config.trainer.weights.host = arguments.host
            embedded = config.inference.engine == "embedded"
            RlTrainer(config.trainer, resume=resume, status=status, engines=engines, embedded=embedded, **stops).run()
        else:
            with frozen_imports():
                from headrace.trainer.dpo import DpoTrainer
                from headrace.trainer.sft import SftTrainer

            trainer = DpoTrainer if isinstance(config, DpoConfig) else SftTrainer
            trainer(config, resume=resume, status=status, engines=engines, **stops).run()
        from headrace.trainer.ranks import destroy_process_group

        destroy_process_group()
    return request.exit_code


def colocated_engines(config: AnyRun, sharing: str) -> ColocatedEngines:
    """Describe the servers that share the device with a run's trainer."""
    trainer = config.trainer if isinstance(config, RunConfig) else config
    inference, servers = config.inference, servers_at_least(config)
    return ColocatedEngines(
        alternates=sharing == "alternate",
        trainer_bytes_per_parameter=bytes_per_parameter(trainer, while_training=True),
        servers=servers,
        share=inference.memory_share(servers),
        cache_bytes=None if inference.kv_cache_gb is None else int(inference.kv_cache_gb * 1e9),
    )


def bytes_per_parameter(trainer: TrainingConfig, *, while_training: bool) -> float:
    """Return what a trainer keeps on its device per parameter of its model, with the adapter of that model."""
    share = None
    if trainer.lora is not None and trainer.model.name is not None:
        directory = model_directory(trainer.model.name)
        share = adapter_share(directory, trainer.lora.r, trainer.lora.target_modules)
    return trainer.bytes_per_parameter(while_training=while_training, adapter_share=share)


def _run_ranks(arguments: argparse.Namespace, resume: str | None) -> int:
    from headrace.trainer.ranks import Node, run_ranks

    setup_logging()
    stop_with_launcher()
    os.environ[PARENT_VAR] = str(os.getpid())
    node = Node(arguments.node_rank, arguments.nodes, arguments.rendezvous) if arguments.nodes > 1 else None
    options = [*(["--host", arguments.host] if arguments.host else []), *(["--resume"] if resume else [])]
    with TemporaryDirectory(prefix="headrace-ranks-") as folder:
        os.environ[RANKS_VAR] = folder
        requests: list[int] = []

        def forward(number: int, frame: FrameType | None) -> None:
            requests.append(number)
            ranks = [int(path.name) for path in Path(folder).iterdir()]
            for pid in ranks or [os.getpid()]:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGUSR1 if ranks else signal.SIGTERM)

        signal.signal(signal.SIGUSR1, forward)
        code = run_ranks(arguments.ranks, ["trainer", str(arguments.run), *options], node)
    return SAVED if requests and not code else code


def _check_resume(directory: Path, resume: str | None) -> str | None:
    """Raise `BadRequest` if `resume` is an older checkpoint: going back concerns the whole run."""
    if resume is None:
        return None
    if plan_directory(directory, resume, clean=False).fork_of is not None:
        fix = "To go back to it, use headrace rl, headrace sft or headrace dpo."
        raise BadRequest(f"not the newest checkpoint of {directory}", key="--resume", value=resume, fix=fix)
    return LATEST
