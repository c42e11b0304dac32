"""`headrace orchestrator`: start the orchestrator of a run alone; it continues where its journal ends."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

from headrace.cli.process import leave_at_once, process

STOPPED = 143
"""What a shell reports for a process that SIGTERM has ended."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory, or its config.toml")
    parser.add_argument("--servers", metavar="N", type=int, default=1, help="inference servers to wait for (default 1)")
    parser.add_argument(
        "--sharing", choices=("alternate", "overlap"), help="servers and trainer are on one device: in turns, or not"
    )


def run(arguments: argparse.Namespace) -> int:
    from headrace.launch.saved_config import read_sampled_run, run_directory
    from headrace.observe.monitors import forwarding
    from headrace.orchestrator import main
    from headrace.orchestrator.shutdown import CANCEL_GRACE_S
    from headrace.runfile.run import RunConfig

    config = read_sampled_run(arguments.run)
    run = run_directory(config)
    orchestrator = config.orchestrator if isinstance(config, RunConfig) else config.evaluator()
    with process("orchestrator", run) as status, forwarding(run, config.wandb, config.tensorboard):
        shares_device = arguments.sharing == "alternate"
        over = main.run(orchestrator, run=run, status=status, servers=arguments.servers, shares_device=shares_device)
    # It stops in order when asked to; whoever supervises must be able to tell that from the end of the run.
    code = 0 if over else STOPPED
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(CANCEL_GRACE_S)
            if thread.is_alive():
                leave_at_once(code)
    return code
