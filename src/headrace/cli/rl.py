"""`headrace rl`: train a model with reinforcement learning; starts and supervises the three processes."""

from __future__ import annotations

import argparse

from headrace.cli.arguments import add_run_arguments
from headrace.cli.training import run_from_files


def configure(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "--trainer.optim.lr 1e-5")


def run(arguments: argparse.Namespace) -> int:
    from headrace.runfile.run import RunConfig

    return run_from_files(RunConfig, "rl", arguments)
