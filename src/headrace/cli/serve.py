"""`headrace serve`: serve a model over HTTP, or the model of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import RUN_FILES
from headrace.cli.process import process

if TYPE_CHECKING:
    from headrace.config.inference import InferenceConfig

PORT = 8000


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="MODEL|RUN", help="a model directory or hub name; a run directory or run file"
    )
    parser.add_argument("--name", default="inference", help="what this server of a run is called (default inference)")
    parser.epilog = (
        f"Any key of [inference] can be set: --port N (default {PORT} for a model), --host, --max_running, ..."
    )


def run(arguments: argparse.Namespace) -> int:
    from headrace.observe.logs import setup_logging
    from headrace.transport.run_dir import RunDir

    config = read_target(arguments.target, arguments.overrides)
    from headrace.inference.server.main import serve  # takes seconds: not before the arguments are known to be good

    if config.output_dir is None:
        setup_logging()
        serve(config, status=None, run=None)
        return 0
    run = RunDir(config.output_dir)
    with process(arguments.name, run) as status:
        serve(config, status=status, run=run)
    return 0


def read_target(target: str, overrides: list[str]) -> InferenceConfig:
    """The server's configuration: that of a run, or a model's with the port everyone expects."""
    from headrace.config.base import Tree, parse_overrides, put, validate
    from headrace.config.inference import InferenceConfig
    from headrace.config.run import RunConfig
    from headrace.launch.saved_config import read_sampled_run
    from headrace.text.hub import model_directory

    path = Path(target)
    tree: Tree
    if path.suffix in RUN_FILES or (path / "config.toml").is_file():
        config = read_sampled_run(path)
        server = config.inference if isinstance(config, RunConfig) else config.server()
        tree = server.model_dump(mode="json", exclude_none=True)
    else:
        tree = {"model": {"name": str(model_directory(target))}, "port": PORT}
    for key, value in parse_overrides(overrides):
        put(tree, key, value)
    return validate(InferenceConfig, tree, target)[0]
