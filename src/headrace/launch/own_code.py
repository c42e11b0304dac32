"""Where a user's own modules lie: beside the run files, and where the run was started.

The folders are kept in the run's directory, so that whatever is done with the run later, from wherever, finds the same
code. One that is gone by then is as good as not there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RunDir


def find_code_beside(files: Sequence[Path]) -> list[str]:
    """Make modules beside these run files importable, here and in every process started from here. Returns the folders.

    Beside a run's saved configuration are the folders of that run.
    """
    folders = [os.getcwd()]
    for file in files:
        run = RunDir(file.resolve().parent)
        folders += [str(run.root), *(_saved(run) if file.resolve() == run.config else ())]
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*(known.split(os.pathsep) if known else ()), *folders]))
    return _find(folders)


def find_code_of(run: RunDir) -> None:
    """Make importable what the run was started with, and what lies in the working directory."""
    _find([*_saved(run), os.getcwd()])


def save_folders(folders: Sequence[str], run: RunDir) -> None:
    write_atomically(run.code_folders, msgspec.json.format(msgspec.json.encode(folders)) + b"\n")


def _saved(run: RunDir) -> list[str]:
    """None where the run is of an older version, or was started process by process."""
    return msgspec.json.decode(run.code_folders.read_bytes(), type=list[str]) if run.code_folders.is_file() else []


def _find(folders: Sequence[str]) -> list[str]:
    distinct = list(dict.fromkeys(folders))
    sys.path += [folder for folder in distinct if folder not in sys.path]
    return distinct
