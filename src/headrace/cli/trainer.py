"""`headrace trainer`: start the trainer of a run alone, an RL run or an SFT run."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_resume
from headrace.cli.process import StopRequest, process

if TYPE_CHECKING:
    from headrace.config.sft import SftConfig
    from headrace.inference.colocation import ColocatedEngines
    from headrace.runfile.run import RunConfig


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory, or its config.toml")
    parser.add_argument("--ranks", metavar="N", type=int, default=1, help="processes that train together (default 1)")
    parser.add_argument(
        "--sharing", choices=("alternate", "overlap"), help="the run's servers are on the same device: in turns, or not"
    )
    add_resume(parser)


def run(arguments: argparse.Namespace) -> int:
    from headrace.config.sft import SftConfig
    from headrace.launch.errors import BadRequest
    from headrace.launch.saved_config import read_run, run_directory
    from headrace.observe.monitors import forwarding
    from headrace.runfile.run import RunConfig
    from headrace.transport.lock import only_one

    if arguments.sharing is not None and max(arguments.ranks, int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise BadRequest(
            "--sharing: one rank alone can share its device with servers; leave out --sharing, or the other ranks"
        )
    config = read_run(arguments.run)
    run = run_directory(config)
    resume = check_resume(run.root, arguments.resume)
    if arguments.ranks > 1:
        return run_ranks(arguments.ranks, arguments.run, resume)
    engines = colocated_engines(config, arguments.sharing) if arguments.sharing else None
    is_first = os.environ.get("RANK", "0") == "0"
    # Where there is an orchestrator, it forwards the metrics: it ends last.
    forwards = is_first and isinstance(config, SftConfig) and not config.evaluates
    monitors = (config.wandb, config.tensorboard) if forwards else (None, None)
    with (
        only_one(run, "trainer") if is_first else nullcontext(),
        process("trainer", run) as status,
        forwarding(run, *monitors),
    ):
        request = StopRequest(status)
        if isinstance(config, RunConfig):
            from headrace.trainer.rl import RlTrainer

            RlTrainer(
                config.trainer,
                resume=resume,
                stopped=request.stopped,
                status=status,
                engines=engines,
                embedded=config.inference.engine == "embedded",
            ).run()
        else:
            from headrace.trainer.sft import SftTrainer

            SftTrainer(config, resume=resume, stopped=request.stopped, status=status, engines=engines).run()
        from headrace.trainer.ranks import leave

        leave()
    return request.exit_code


def colocated_engines(config: RunConfig | SftConfig, sharing: str) -> ColocatedEngines:
    """What the trainer of a run has to know of the servers beside it."""
    from headrace.inference.colocation import ColocatedEngines
    from headrace.runfile.run import RunConfig

    trainer = config.trainer if isinstance(config, RunConfig) else config
    inference, servers = config.inference, config.launch.inference_servers or 1
    return ColocatedEngines(
        alternates=sharing == "alternate",
        trainer_bytes_per_parameter=trainer.bytes_per_parameter(while_training=True),
        servers=servers,
        share=inference.memory_share(servers),
        cache_bytes=None if inference.kv_cache_gb is None else int(inference.kv_cache_gb * 1e9),
    )


def run_ranks(count: int, target: Path, resume: str | None) -> int:
    from headrace.launch.process import PARENT_VAR, stop_with_launcher
    from headrace.observe.logs import setup_logging
    from headrace.trainer import ranks

    setup_logging()
    stop_with_launcher()
    os.environ[PARENT_VAR] = str(os.getpid())
    return ranks.run_ranks(count, ["trainer", str(target), *(["--resume"] if resume else [])])


def check_resume(directory: Path, resume: str | None) -> str | None:
    """A trainer alone continues from the newest checkpoint or not at all: going back concerns the whole run."""
    from headrace.launch.errors import BadRequest
    from headrace.launch.run_directory import LATEST, plan_directory

    if resume is None:
        return None
    if plan_directory(directory, resume, clean=False).fork_of is not None:
        raise BadRequest(
            f"--resume {resume}: not the newest checkpoint of {directory}; to go back to it, use headrace rl or sft"
        )
    return LATEST
