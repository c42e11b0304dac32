"""`headrace tokens`: the tokens of a training step, and what each did to its gradient."""

from __future__ import annotations

import argparse
from pathlib import Path

MOST = 20
"""Tokens that are shown unless the command says how many."""
PIPE_WIDTH = 200
"""Columns where there is no terminal to fit into."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument("step", metavar="STEP", type=int, nargs="?", help="a step whose tokens were exported [newest]")
    parser.add_argument("--sample", metavar="N", type=int, help="only this sample of the batch, token by token")
    parser.add_argument(
        "--top", metavar="K", type=_at_least_one, help=f"only the K tokens with the largest gradients [{MOST}]"
    )


def run(arguments: argparse.Namespace) -> int:
    import sys

    from rich.console import Console

    from headrace.config.base import ConfigError
    from headrace.launch.saved_config import read_rl_run, run_directory
    from headrace.observe.token_view import largest, read_tokens, render
    from headrace.text.hub import model_directory
    from headrace.text.tokenizer import Tokenizer

    config = read_rl_run(arguments.run)
    header, tokens = read_tokens(run_directory(config).tokens, arguments.step, arguments.sample)
    if arguments.top is not None or arguments.sample is None:
        tokens = largest(tokens, arguments.top or MOST)
    if config.model.name is None:
        raise ConfigError("not set, and text needs the model's tokenizer", key="model.name", file=arguments.run)
    tokenizer = Tokenizer(model_directory(config.model.name))
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(render(header, tokens, tokenizer.decode))
    return 0


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value
