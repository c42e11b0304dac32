"""`headrace check-algorithm`: test an algorithm with worked numbers and invariants, without a model."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

from headrace import imports
from headrace.cli.common import importable
from headrace.config.base import ConfigError, Tree, as_table
from headrace.config.files import read_file
from headrace.environments.fault import fault_of
from headrace.errors import BadInput
from headrace.launch.own_code import add_code_folders
from headrace.observe.console import SafeConsole
from headrace.runfile.reading import put_algorithm_keys
from headrace.tools.check_algorithm.fixtures import algorithm_config
from headrace.tools.check_algorithm.invariants import check_algorithm
from headrace.tools.check_algorithm.results import render_report


def configure_check_algorithm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "algorithm",
        metavar="TYPE_OR_PATH",
        help="a type as in a run file, package.module:Class, my_file.py:Class, or my_file.py:function",
    )
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="a run file, whose [orchestrator.algo] is taken, or its keys alone"
    )
    parser.add_argument("--env", metavar="NAME", help="take the algorithm of this environment in the run file")
    parser.epilog = "Keys of the algorithm: --algo.normalize std --algo.kwargs.decay 0.9"


def run_check_algorithm(arguments: argparse.Namespace) -> int:
    section = read_section(arguments.algorithm, arguments.config, arguments.overrides, arguments.env)
    config = algorithm_config(section, str(arguments.config or "command line"))
    logging.getLogger("headrace").addHandler(logging.NullHandler())  # the checks provoke warnings
    report = asyncio.run(check_algorithm(config))
    SafeConsole().print(render_report(report))
    return 0 if report.passed else 1


def read_section(algorithm: str, file: Path | None, overrides: list[str], env: str | None = None) -> Tree:
    """Return the `algo` section: that of the file, `--algo.key value` overrides, and the named algorithm."""
    section: Tree = {}
    if file is not None:
        section = _section_of(read_file(file), file, env)
        add_code_folders([file])  # as a run does
    elif env is not None:
        raise ConfigError("no run file is given", key="--env", value=env, fix="Name it with --config FILE.")
    put_algorithm_keys(section, overrides)
    named = _named(algorithm)
    for key, value in named.items():
        if section.get(key, value) != value:
            raise ConfigError(f"{value!r} is to be checked", key=key, value=section[key], file=file or "command line")
    return {**section, **named}


def _section_of(tree: Tree, file: Path, env: str | None) -> Tree:
    """Return the section of the environment, if one is named and has its own, else that of the run."""
    of_run = tree.get("orchestrator")
    if not isinstance(of_run, dict):
        if env is not None:
            raise ConfigError(f"{file} has no [orchestrator]", key="--env", value=env)
        return tree
    envs = {entry.get("name") or entry.get("id"): _algo(entry) for entry in of_run.get("train", {}).get("env", [])}
    if env is not None and env not in envs:
        fact = f"{file} has no such environment to train on"
        raise ConfigError(fact, key="--env", value=env, fix=f"It has {', '.join(envs)}.")
    own = [name for name, section in envs.items() if section is not None]
    section = _algo(of_run)
    if env is None and section is None and own:
        fact = "only environments have an algo here"
        raise ConfigError(fact, file=file, key="algo", fix=f"Write --env {' or --env '.join(own)}.")
    return (envs[env] if env is not None else None) or section or {}


def _algo(table: Tree) -> Tree | None:
    section = table.get("algo", table.get("advantage"))
    return None if section is None else dict(as_table(section, "type"))


def _named(algorithm: str) -> Tree:
    """Return the keys that select the algorithm: a shipped type, a class, or a function for `custom`."""
    path = importable(algorithm, "algorithm")
    if ":" not in path:
        return {"type": path}
    try:
        loaded = imports.load(path, "algorithm")
    except BadInput:
        raise
    except Exception as error:
        fault = fault_of(error)
        raise BadInput(f"cannot be imported: {fault.text} ({fault.place})", key="algorithm", value=path) from error
    is_function = callable(loaded) and not isinstance(loaded, type)
    return {"type": "custom", "import_path": path} if is_function else {"type": path}
