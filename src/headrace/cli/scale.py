"""`headrace scale`: change the number of inference servers of a run while it runs."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

from headrace.cli.common import positive
from headrace.launch.driver_client import DriverClient, find_driver
from headrace.launch.node_messages import Scale, Scaled
from headrace.launch.run_directory import find_run

TIMEOUT_S = 30.0


def configure_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory, or its config.toml")
    parser.add_argument(
        "--inference", metavar="N", type=positive, required=True, help="inference servers that the run shall have"
    )


def run_scale(arguments: argparse.Namespace) -> int:
    with closing(DriverClient(find_driver(find_run(arguments.run)))) as client:
        print(client.post("/scale", Scale(arguments.inference), Scaled, TIMEOUT_S).message)
    return 0
