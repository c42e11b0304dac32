"""`headrace sft`: train a model on examples."""

from __future__ import annotations

import argparse

from headrace.cli.arguments import add_run_arguments
from headrace.cli.training import run_from_files


def configure(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "--optim.lr 1e-5")


def run(arguments: argparse.Namespace) -> int:
    from headrace.config.sft import SftConfig

    return run_from_files(SftConfig, "sft", arguments)
