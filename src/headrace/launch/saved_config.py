"""The configuration in a run directory: resolve it, write it, read it, compare it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from headrace.config.base import Config, ConfigError, Origins, Tree
from headrace.config.dpo import DpoConfig
from headrace.config.files import dump, dump_sealed, read_file, read_toml
from headrace.config.sft import OfflineConfig, SftConfig
from headrace.launch.own_code import add_code_folders
from headrace.launch.run_directory import find_run
from headrace.runfile.hackable.translation import is_hackable
from headrace.runfile.reading import leaves, load, merge, put, validate, value_at
from headrace.runfile.run import SHARED, AnyRun, RunConfig
from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RunDir

T = TypeVar("T", bound=Config)


def pin(config: T, output_dir: Path, model: str) -> T:
    """Return the configuration with `model` as its only model name, and with absolute paths."""
    tree = config.model_dump(mode="json", exclude_none=True)
    shared = SHARED if isinstance(config, RunConfig) else {}
    for path in ("model", *shared.get("model", ())):
        for origin in ("init", "sft"):
            section = value_at(tree, path.split("."))
            section.pop(origin, None)
        put(tree, [*path.split("."), "name"], model)
    for path in ("output_dir", *shared.get("output_dir", ())):
        put(tree, path.split("."), str(output_dir.absolute()))
    if isinstance(config, RunConfig):
        for slot in ("train", "eval"):
            for env in value_at(tree, ["orchestrator", slot, "env"]) or []:
                if env["id"] == "hackable":  # it counts tokens itself
                    env["args"].setdefault("tokenizer_name", model)
    if isinstance(config, OfflineConfig):
        for key, source in (("data", config.data), ("validation", config.validation)):
            if source is not None and source.path is not None:
                put(tree, [key, "path"], str(source.path.absolute()))
            elif source is not None and source.name is not None and Path(source.name).is_dir():
                put(tree, [key, "name"], str(Path(source.name).absolute()))
    return validate(type(config), tree, "resolved configuration")[0]


def read_model_file(file: Path, trail: Sequence[Path]) -> tuple[SftConfig, list[str]]:
    """Read the run file of `model.sft`; return notices, too. `trail` are the run files that depend on it."""
    if file.resolve() in trail:
        circle = " -> ".join(map(str, (*trail, file.resolve())))
        raise ConfigError(f"the run file depends on itself: {circle}", key="model.sft", value=file)
    if not file.is_file():
        raise ConfigError("no such file", key="model.sft", value=file)
    add_code_folders([file])
    return load(SftConfig, [file])


def save(config: Config, run: RunDir) -> None:
    write_atomically(run.config, dump_sealed(config).encode())


def kind_of_tree(tree: Tree) -> type[AnyRun] | None:
    """Return the kind of a run by its merged run files; None if they could be of several.

    Training on examples has data, and neither an orchestrator nor a data provider.
    """
    if "orchestrator" in tree or is_hackable(tree):
        return RunConfig
    return DpoConfig if "dpo" in tree else SftConfig if "data" in tree else None


def merge_files(files: Sequence[Path]) -> dict[str, Any]:
    """Return the merged content of run files, as written."""
    tree: dict[str, Any] = {}
    for file in files:
        merge(tree, read_file(file))
    return tree


def kind_of(files: Sequence[Path]) -> type[AnyRun] | None:
    """Return the kind of a run by its run files; None if they could be of several."""
    return kind_of_tree(merge_files(files))


def read_run(path: Path) -> AnyRun:
    """Return the configuration of a run, given its directory or its config.toml. The directory may have been moved."""
    run = RunDir(find_run(path))
    tree = read_file(run.config)
    kind = kind_of_tree(tree) or RunConfig
    tree, _ = kind.translated(tree, [run.config], Origins(str(run.config)))
    config, _ = validate(kind, tree, str(run.config))
    if config.model.name is not None:
        config = pin(config, run.root, config.model.name)
    return config


def evaluation_directory(run: Path | None, name: str) -> Path:
    """Return the default output directory of `headrace eval` for environment `name`.

    `artifacts/eval/NAME` in the storage root of `run`, the first run that is evaluated; `outputs/eval/NAME` if `run` is
    None or has no storage root.
    """
    root = None if run is None else read_run(run).launch.storage_root
    return (Path("outputs") if root is None else root / "artifacts") / "eval" / re.sub("[/:]", "-", name)


def read_rl_run(path: Path) -> RunConfig:
    config = read_run(path)
    if not isinstance(config, RunConfig):
        raise ConfigError("trained on examples; this needs an RL run", key="RUN", value=path)
    return config


def read_sampled_run(path: Path) -> AnyRun:
    """Return the configuration of a run that has an orchestrator and an inference server."""
    config = read_run(path)
    if isinstance(config, OfflineConfig) and not config.evaluates:
        fact = "a run on examples without [[eval.env]] has no orchestrator and no inference server"
        raise ConfigError(fact, key="RUN", value=path)
    return config


def changes(config: Config, run: RunDir) -> list[str]:
    """Return the keys in which `config` differs from the saved one, as `key: old -> new`; or why that is unknown."""
    if not run.config.is_file():
        return []
    try:
        old, new = leaves(read_toml(run.config)), leaves(tomllib.loads(dump(config)))
    except ConfigError as error:  # it is written again
        return [f"{run.config}: {error.fact}"]
    changed = [key for key in (*old, *new) if old.get(key) != new.get(key)]
    # A shared key and its copies in the sections are one change.
    copies = {
        copy + key.removeprefix(source)
        for source, targets in SHARED.items()
        for key in changed
        if key == source or key.startswith(f"{source}.")
        for copy in targets
    }
    return [
        f"{key}: {_shown(old.get(key))} -> {_shown(new.get(key))}"
        for key in dict.fromkeys(changed)
        if key not in copies
    ]


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)


def run_directory(config: AnyRun) -> RunDir:
    if config.output_dir is None:
        raise ConfigError("not set", key="output_dir", fix="Set the directory of the run.")
    return RunDir(config.output_dir)
