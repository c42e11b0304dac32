"""`headrace node`, the agent of one host of a run, and `headrace scale`, which changes the number of its servers."""

from __future__ import annotations

import argparse
import os
import socket
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import get_args

from headrace.cli.common import positive
from headrace.launch.driver_client import DriverClient, find_driver
from headrace.launch.errors import BadRequest
from headrace.launch.hosts.base import HostRole
from headrace.launch.node import NodeAgent, log_to_run
from headrace.launch.node_messages import NODE_NAME, Scale, Scaled
from headrace.launch.run_directory import find_run
from headrace.launch.slurm_job import REQUEUE_VAR, requeue_without_launcher
from headrace.observe.status import setup_logging
from headrace.transport.run_dir import RunDir

WAIT_S = 30.0
ROLES = [role for role in get_args(HostRole) if role]
EPILOG = """The launcher of the run (headrace rl, headrace sft) is found by HEADRACE_DRIVER (its URL) and
HEADRACE_DRIVER_KEY, or by RUN/driver.json, which it writes when it starts."""


def configure_node(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory, which all hosts see")
    parser.add_argument("--name", help="the name of this host in the run [SLURM's name of it, or its host name]")
    parser.add_argument(
        "--wait", metavar="S", type=float, default=WAIT_S, help=f"seconds to wait for the launcher [{WAIT_S:g}]"
    )
    parser.add_argument("--role", choices=ROLES, default="", help="what this host is meant for [anything]")
    parser.add_argument("--state", metavar="FILE", type=Path, help="keep `waiting` or `joined` in this file")


def run_node(arguments: argparse.Namespace) -> int:
    name = arguments.name or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    if not NODE_NAME.fullmatch(name):
        fix = "Use letters, digits, dots, hyphens and underscores."
        raise BadRequest("not allowed as the name of a host", key="--name", value=name, fix=fix)
    setup_logging()
    log_to_run(arguments.run, name)
    if os.environ.get(REQUEUE_VAR):
        watch = partial(requeue_without_launcher, RunDir(arguments.run).heartbeat)
        threading.Thread(target=watch, name="requeue", daemon=True).start()
    with closing(NodeAgent(arguments.run, name, arguments.wait, arguments.role, arguments.state)) as agent:
        return agent.run()


TIMEOUT_S = 30.0


def configure_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory, or its config.toml")
    parser.add_argument(
        "--inference", metavar="N", type=positive, required=True, help="the new number of inference servers"
    )


def run_scale(arguments: argparse.Namespace) -> int:
    with closing(DriverClient(find_driver(find_run(arguments.run)))) as client:
        print(client.post("/scale", Scale(arguments.inference), Scaled, TIMEOUT_S).message)
    return 0
