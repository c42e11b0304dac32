"""Where a run's model comes from: a directory, the hub, or something that Headrace makes once and keeps.

What is made is kept under a hash of everything that shapes it, so a changed recipe is a different model. It is made
beside its place and renamed, under a lock: two runs that start at once make it once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace import __version__
from headrace.config.base import ConfigError
from headrace.config.files import dump, read_toml
from headrace.config.launch import CACHE_VARIABLE, LaunchConfig
from headrace.config.model import ModelConfig
from headrace.config.sft import SftConfig, SftDataConfig, SftEvalConfig
from headrace.launch.errors import LaunchError
from headrace.launch.local import make_supervisor
from headrace.launch.own_code import find_code_beside
from headrace.launch.saved_config import pin, save
from headrace.runfile.reading import load, value_at
from headrace.text.hub import model_directory
from headrace.transport.lock import lock
from headrace.transport.run_dir import RunDir

TINY_SEED = 0
TINY_RECIPE = 2
"""Grows when `trainer/tiny.py` writes something else, so that a cached model of the older recipe is left alone."""


def cache_directory() -> Path:
    """Return `$HEADRACE_CACHE`, else the user's cache directory."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def resolve(model: ModelConfig, trail: tuple[Path, ...] = ()) -> str:
    """The directory of the model, made or fetched if need be."""
    if model.sft is not None:
        return str(_trained(model.sft, trail))
    if model.init is not None:
        return str(_cached(_digest(f"{model.init} {TINY_RECIPE} {TINY_SEED}"), f"{model.init} model", _write_tiny))
    if model.name is not None:
        return str(model_directory(model.name, "model.name").absolute())
    raise ConfigError("the run has no model", key="model", fix="Set model.name, model.init or model.sft.")


def resolve_again(model: ModelConfig, run: RunDir) -> str:
    """For a run that goes on: what it has learned belongs to the model that it began with, whatever made that one.

    The code and the data behind `model.sft` may have changed since. A model that is gone is made again as they are now.
    """
    began_with = model_of_run(run) if model.sft or model.init else None
    if began_with is not None:
        _say(f"the run goes on with the model that it began with, {began_with}; for another one, start a new run")
        return began_with
    return resolve(model)


def model_of_run(run: RunDir) -> str | None:
    """Return the model that a run began with, if it has begun and the model is still there."""
    name = value_at(read_toml(run.config), ["model", "name"]) if run.config.is_file() else None
    return name if name is not None and os.path.isdir(name) else None


def _trained(file: Path, trail: tuple[Path, ...]) -> Path:
    """The model that an SFT run file describes."""
    if file.resolve() in trail:
        circle = " -> ".join(map(str, (*trail, file.resolve())))
        raise ConfigError(f"the file starts from itself: {circle}", key="model.sft", value=file)
    if not file.is_file():
        raise ConfigError("no such file", key="model.sft", value=file)
    find_code_beside([file])
    config, notices = load(SftConfig, [file])
    for notice in notices:
        _say(notice)
    # Only the model is kept: an evaluation could not be read, and a monitor would show a directory that is gone.
    config = config.model_copy(update={"eval": SftEvalConfig(), "wandb": None, "tensorboard": None})
    base = resolve(config.model, (*trail, file.resolve()))
    # Where and by how many processes it is trained does not shape it.
    recipe = dump(config.model_copy(update={"output_dir": None, "launch": LaunchConfig()}))

    def train(draft: Path, held: int) -> Path:
        run = RunDir(draft)
        pinned = pin(config, draft, base)
        save(pinned, run)
        if code := make_supervisor(pinned, run, f"sft {file.name}", resume=False, inherited=(held,)).run():
            raise SystemExit(code)  # interrupted: the launcher has said so
        return run.final_model

    digest = _digest(recipe, base, _content(config.data))
    return _cached(digest, f"model of {os.path.relpath(file)}", train)


def _content(data: SftDataConfig) -> str:
    """What identifies the examples: the content of files, the code of a user's environment and the files in its args.

    Of a dataset on the hub its name must do, and of the code of an environment that ships, too.
    """
    if data.path is not None:
        if not data.path.exists():
            raise ConfigError("no such file or directory", key="data.path", value=data.path)
        return _hash(data.path)
    if data.name is not None and Path(data.name).is_dir():
        return _hash(Path(data.name))
    if data.env is not None:
        code = [_code_of(data.env.partition(":")[0])] if ":" in data.env else []
        return " ".join(code + [_hash(Path(text)) for text in _texts(data.args) if os.path.exists(text)])
    return ""


def _texts(value: Any) -> Iterator[str]:
    """All texts in an argument, in lists and tables, too: any of them may be the name of a file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _code_of(module: str) -> str:
    """The hash of a module's file, as the trainer will find it; what the module imports is not looked at."""
    name = Path(*module.split("."))
    for folder in (*sys.path, os.getcwd()):
        for file in (Path(folder) / name.with_suffix(".py"), Path(folder) / name / "__init__.py"):
            if file.is_file():
                return _hash(file)
    return ""


def _hash(path: Path) -> str:
    """Of a file, or of all files below a directory."""
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return _digest(*(f"{file.relative_to(path)} {_hash(file)}" for file in files))


def _write_tiny(draft: Path, held: int) -> Path:
    """In a process of its own: the launcher stays free of torch."""
    command = [sys.executable, "-m", "headrace", "init-model", "tiny", str(draft / "model"), "--seed", str(TINY_SEED)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, pass_fds=(held,)
    )
    if done.returncode:
        raise LaunchError(f"the tiny model could not be made:\n{done.stdout.rstrip()}")
    return draft / "model"


def _cached(digest: str, what: str, make: Callable[[Path, int], Path]) -> Path:
    """The cached model; `make` fills a draft directory and says where in it the model is.

    It also gets the lock's descriptor, for the processes it starts to hold: they may outlive this one.
    """
    place = cache_directory() / "models" / digest
    if place.is_dir():
        _say(f"{what}: from the cache, {place}")
        return place
    draft = place.with_name(f"{digest}.tmp")
    waiting = f"{what}: process {{}} makes it, waiting"
    with lock(place.with_name(f"{digest}.lock"), lambda holder: _say(waiting.format(holder))) as held:
        if not place.is_dir():  # someone else may have made it while we waited
            _say(f"{what}: made once, then kept in {place}")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            os.replace(make(draft, held), place)
            shutil.rmtree(draft, ignore_errors=True)
    return place


def _say(message: str) -> None:
    print(f"headrace: {message}", file=sys.stderr, flush=True)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join((f"headrace {__version__}", *parts)).encode()).hexdigest()[:20]
