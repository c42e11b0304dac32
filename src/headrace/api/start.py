"""Start a run from Python: its launcher is a process of its own, the same as that of `headrace rl`, `sft` or `dpo`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import tomli_w

from headrace.api.run import Event, Events, Run, RunFailed
from headrace.config.base import ConfigError
from headrace.errors import BAD_INPUT, BadInput
from headrace.launch.hosts.base import ProcessSpec
from headrace.launch.own_code import add_code_folders
from headrace.launch.process import Lifeline, Process
from headrace.launch.saved_config import kind_of
from headrace.runfile.reading import load
from headrace.runfile.run import RunConfig
from headrace.transport.run_dir import RunDir

RunFile = str | Path | Mapping[str, Any]
"""A run file, or its content."""


class StartedRun(Run):
    """A run whose launcher this process has started. The run stops, and can be resumed, if this process ends."""

    def __init__(self, directory: Path, argv: Sequence[str], folder: TemporaryDirectory[str], *, clean: bool) -> None:
        self.files = RunDir(directory)
        self._replaced = _identity(self.files.metrics) if clean else None
        self._folder, self._lifeline = folder, Lifeline()
        spec = ProcessSpec("the run", [sys.executable, "-m", "headrace", *argv], {})
        self._process = Process(spec, Path(folder.name) / "output.log", self._lifeline)

    @property
    def output(self) -> str:
        """What the command has printed so far."""
        return self._process.log.read_text(errors="replace")

    @property
    def state(self) -> str:
        return "running" if self._process.running else super().state

    def events(self) -> Events:
        """Return the events of this run, without those of an older run that `clean` is about to delete."""
        metrics, replaced = self.files.metrics, self._replaced
        return Events(metrics, self._is_over, lambda: replaced is not None and _identity(metrics) == replaced)

    def stop(self) -> None:
        self._process.terminate()

    def _is_over(self) -> bool:
        return not self._process.running

    def _raise_failure(self) -> None:
        status = self._process.exit_status
        if status and super().state != "stopped":
            lines = "\n".join(f"    {line}" for line in self._process.last_lines())
            message = f"the run {self._process.how_it_ended()}; the end of its output:\n{lines}"
            raise (BadInput if status == BAD_INPUT else RunFailed)(message)


def start(
    config: RunFile | Sequence[str | Path],
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: bool | int = False,
    clean: bool = False,
) -> StartedRun:
    """Start a run and return it at once.

    `config` is a run file, several that are merged left to right, or the content of one. Keys of `overrides` are as on
    the command line: `{"trainer.optim.lr": 1e-5}`; None removes a key. `resume`: continue the run in `output_dir` from
    its newest checkpoint, or from that of a step. `clean`: delete it first. Invalid settings raise `ConfigError` here.
    """
    folder = TemporaryDirectory(prefix="headrace-run-")
    if isinstance(config, Mapping):
        files = [Path(folder.name) / "run.toml"]
        files[0].write_text(tomli_w.dumps(dict(config)), encoding="utf-8")
    else:
        files = [Path(config)] if isinstance(config, str | Path) else [Path(file) for file in config]
    options = _options(overrides or {})
    add_code_folders(files)
    kind = kind_of(files) or RunConfig
    output_dir = load(kind, files, options)[0].output_dir
    if output_dir is None:
        raise ConfigError("not set", key="output_dir", fix="Set the directory of the run: --output_dir outputs/NAME.")
    if resume is not False:
        options.append("--resume" if resume is True else f"--resume={resume}")
    if clean:
        options.append("--clean")
    return StartedRun(output_dir, [kind.COMMAND, *map(str, files), *options], folder, clean=clean)


def run(
    config: RunFile | Sequence[str | Path],
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: bool | int = False,
    clean: bool = False,
    on_event: Callable[[Event], object] | None = None,
) -> Run:
    """Start a run as `start` does, and return it when it has ended. Raises `RunFailed`.

    `on_event` is called with each batch, step and evaluation. If it raises, or on Ctrl-C, the run is stopped in order.
    """
    started = start(config, overrides, resume=resume, clean=clean)
    try:
        for event in started.events():
            if on_event is not None:
                on_event(event)
        return started.wait()
    except BaseException:
        started.stop()
        while not started._is_over():
            started._process.wait(1.0)
        raise


def _identity(file: Path) -> tuple[int, int] | None:
    """Return inode and modification time of a file, by which a replaced or changed file is recognized."""
    if not file.is_file():
        return None
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


def _options(overrides: Mapping[str, Any], above: str = "") -> list[str]:
    """Return overrides as command line options; tables become dotted keys."""
    options = []
    for key, value in overrides.items():
        if isinstance(value, Mapping):
            options += _options(value, f"{above}{key}.")
        else:
            plain = str(value) if isinstance(value, Path) else value
            options.append(f"--{above}{key}={msgspec.json.encode(plain).decode()}")  # JSON except null is valid TOML
    return options
