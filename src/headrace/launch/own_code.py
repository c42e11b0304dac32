"""The folders of a user's modules: those of the run files, and the working directory of the launch.

They are saved in the run directory, so that later commands on the run import the same code from any working directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RunDir


def add_code_folders(files: Sequence[Path]) -> list[str]:
    """Make modules beside run files importable, here and in child processes, and return the folders.

    A run's saved configuration adds the folders of that run.
    """
    folders = [os.getcwd()]
    for file in files:
        run = RunDir(file.resolve().parent)
        folders += [str(run.root), *(_saved(run) if file.resolve() == run.config else ())]
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*(path.split(os.pathsep) if path else ()), *folders]))
    return _add_to_path(folders)


def add_code_folders_of(run: RunDir) -> None:
    """Make the modules of a run and of the working directory importable."""
    _add_to_path([*_saved(run), os.getcwd()])


def save_folders(folders: Sequence[str], run: RunDir) -> None:
    write_atomically(run.code_folders, msgspec.json.format(msgspec.json.encode(folders)) + b"\n")


def _saved(run: RunDir) -> list[str]:
    """Return no folders for a run of an older version, or one without a launcher."""
    return msgspec.json.decode(run.code_folders.read_bytes(), type=list[str]) if run.code_folders.is_file() else []


def _add_to_path(folders: Sequence[str]) -> list[str]:
    distinct = list(dict.fromkeys(folders))
    sys.path += [folder for folder in distinct if folder not in sys.path]
    return distinct
