"""Find or create the initial model of a run: a directory, a model on the hub, or one that Headrace creates and caches.

A created model is cached under a hash of everything that determines it. It is written next to its final path and
renamed, under a lock, so that two runs that start together create it once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from headrace import __version__
from headrace.config.base import ConfigError
from headrace.config.files import dump, read_toml
from headrace.config.launch import LaunchConfig
from headrace.config.model import ModelConfig
from headrace.config.monitors import MONITORS
from headrace.config.sft import SftDataConfig, SftEvalConfig
from headrace.launch.errors import LaunchError, notify
from headrace.launch.hosts.local import LocalHosts
from headrace.launch.saved_config import pin, read_model_file, save
from headrace.machine import cache_directory
from headrace.runfile.reading import value_at
from headrace.text.hub import model_directory
from headrace.transport.lock import lock
from headrace.transport.run_dir import RunDir

TINY_SEED = 0
TINY_RECIPE = 2
"""Raise it when `trainer/tiny.py` writes another model, so that models cached before are not used."""


def resolve(model: ModelConfig, trail: tuple[Path, ...] = ()) -> str:
    """Return the directory of a model, which is created or downloaded if necessary."""
    if model.sft is not None:
        return str(_resolve_trained(model.sft, trail))
    if model.init is not None:
        return str(_create_once(_digest(f"{model.init} {TINY_RECIPE} {TINY_SEED}"), f"{model.init} model", _write_tiny))
    if model.name is not None:
        return str(model_directory(model.name, "model.name").absolute())
    raise ConfigError("not set", key="model", fix="Set model.name, model.init or model.sft.")


def model_of_run(run: RunDir) -> str | None:
    """Return the initial model of a run, or None if the run has not begun or the model no longer exists."""
    name = value_at(read_toml(run.config), ["model", "name"]) if run.config.is_file() else None
    return name if name is not None and os.path.isdir(name) else None


def _resolve_trained(file: Path, trail: tuple[Path, ...]) -> Path:
    """Return the model that an SFT run file trains. `trail` are the run files that depend on it."""
    config, notices = read_model_file(file, trail)
    notify(*notices)
    # Only the model is kept: evaluations would be deleted, and monitors would show a deleted directory.
    config = config.model_copy(update={"eval": SftEvalConfig(), **dict.fromkeys(MONITORS)})
    if config.lora is not None:
        config = config.model_copy(update={"lora": config.lora.model_copy(update={"save_merged": True})})
    base = resolve(config.model, (*trail, file.resolve()))
    # The directory and the number of processes do not change the model.
    recipe = dump(config.model_copy(update={"output_dir": None, "launch": LaunchConfig()}))

    def train(draft: Path, held: int) -> Path:
        run = RunDir(draft)
        pinned = pin(config, draft, base)
        save(pinned, run)
        from headrace.launch.run import make_supervisor  # brings rich, which a dry run does not need

        with closing(LocalHosts((held,))) as hosts:
            code = make_supervisor(pinned, run, f"sft {file.name}", hosts, hosts.list(), resume=False).run()
        if code:
            raise SystemExit(code)  # interrupted, which the launcher has reported
        return run.final_model

    digest = _digest(recipe, base, _hash_of_examples(config.data))
    return _create_once(digest, f"model of {os.path.relpath(file)}", train)


def _hash_of_examples(data: SftDataConfig) -> str:
    """Return a hash of the examples: of data files, or of the code of a user's environment and the files in its args.

    A dataset on the hub and a built-in environment are identified by their names alone.
    """
    if data.path is not None:
        if not data.path.exists():
            raise ConfigError("no such file or directory", key="data.path", value=data.path)
        return _hash_of_path(data.path)
    if data.name is not None and Path(data.name).is_dir():
        return _hash_of_path(Path(data.name))
    if data.env is not None:
        code = [_hash_of_module(data.env.partition(":")[0])] if ":" in data.env else []
        return " ".join(code + [_hash_of_path(Path(text)) for text in _strings_in(data.args) if os.path.exists(text)])
    return ""


def _strings_in(value: Any) -> Iterator[str]:
    """Yield all strings in an argument, also in lists and tables: any of them may be the path of a file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(inner)


def _hash_of_module(module: str) -> str:
    """Return the hash of a module's file as the trainer will find it, without the modules that it imports."""
    name = Path(*module.split("."))
    for folder in (*sys.path, os.getcwd()):
        for file in (Path(folder) / name.with_suffix(".py"), Path(folder) / name / "__init__.py"):
            if file.is_file():
                return _hash_of_path(file)
    return ""


def _hash_of_path(path: Path) -> str:
    """Return the hash of a file, or of all files below a directory."""
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return _digest(*(f"{file.relative_to(path)} {_hash_of_path(file)}" for file in files))


def _write_tiny(draft: Path, held: int) -> Path:
    """Write the tiny model in another process, so that the launcher does not import torch."""
    command = [sys.executable, "-m", "headrace", "init-model", "tiny", str(draft / "model"), "--seed", str(TINY_SEED)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, pass_fds=(held,)
    )
    if done.returncode:
        raise LaunchError(f"the tiny model could not be created:\n{done.stdout.rstrip()}")
    return draft / "model"


def _create_once(digest: str, what: str, make: Callable[[Path, int], Path]) -> Path:
    """Return a model from the cache, after creating it if necessary.

    `make` fills a draft directory and returns the path of the model in it. Its second argument is the descriptor of the
    lock, to be inherited by the processes that it starts.
    """
    place = cache_directory() / "models" / digest
    if place.is_dir():
        notify(f"{what}: using the cached {place}")
        return place
    draft = place.with_name(f"{digest}.tmp")
    waiting = f"{what}: waiting for another process, which is creating it"
    with lock(place.with_name(f"{digest}.lock"), lambda: notify(waiting)) as held:
        if not place.is_dir():  # another process may have created it in the meantime
            notify(f"{what}: creating it once, to be cached in {place}")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            os.replace(make(draft, held), place)
            shutil.rmtree(draft, ignore_errors=True)
    return place


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join((f"headrace {__version__}", *parts)).encode()).hexdigest()[:20]
