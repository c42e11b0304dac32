"""A user's own code: the folders of its modules, and a check of a function by its source.

The folders are those of the run files and the working directory of the launch. They are saved in the run directory, so
that later commands on the run import the same code from any working directory.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import BadInput
from headrace.rollout.digest import seal
from headrace.rollout.schema import SCHEMA, DamagedFile, decode_versioned
from headrace.transport.files import write_atomically
from headrace.transport.run_dir import RunDir


class CodeFolders(msgspec.Struct):
    """The content of `code_folders.json`."""

    folders: list[str]
    schema: int = SCHEMA


def add_code_folders(files: Sequence[Path]) -> list[str]:
    """Make modules beside run files importable, here and in child processes, and return the folders.

    A run's saved configuration adds the folders of that run.
    """
    folders = [os.getcwd()]
    for file in files:
        run = RunDir(file.resolve().parent)
        folders += [str(run.root), *(_read_folders(run) if file.resolve() == run.config else ())]
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*(path.split(os.pathsep) if path else ()), *folders]))
    return _add_to_path(folders)


def add_code_folders_of(run: RunDir) -> None:
    """Make the modules of a run and of the working directory importable."""
    _add_to_path([*_read_folders(run), os.getcwd()])


def save_folders(folders: Sequence[str], run: RunDir) -> None:
    write_atomically(run.code_folders, seal(CodeFolders(list(folders))))


def _read_folders(run: RunDir) -> list[str]:
    """Return the saved folders of a run; none for a run of an older version, or one without a launcher."""
    if not run.code_folders.is_file():
        return []
    content = run.code_folders.read_bytes()
    try:
        if content.startswith(b"["):  # of an older version
            return msgspec.json.decode(content, type=list[str])
        return decode_versioned(content, CodeFolders, str(run.code_folders)).folders
    except (ValueError, DamagedFile) as error:
        fix = "Write the folders of your own code as a list of texts, or delete the file."
        raise DamagedFile(f"not readable: {error}", file=run.code_folders, fix=fix) from error


def _add_to_path(folders: Sequence[str]) -> list[str]:
    distinct = list(dict.fromkeys(folders))
    sys.path += [folder for folder in distinct if folder not in sys.path]
    return distinct


def check_function_source(import_path: str, kwargs: dict[str, Any]) -> None:
    """Raise `BadInput` unless the module defines the function and the function takes these kwargs."""
    module, _, name = import_path.partition(":")
    if not (module and name):
        raise BadInput("not an import path", value=import_path, fix="Write package.module:function.")
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        fix = f"Install it, or put {module.partition('.')[0]}.py in the working directory or beside the run file."
        raise BadInput(f"no module named {module!r}", value=import_path, fix=fix)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # compiled, or a namespace package: only an import shows its names
    tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    defined = dict(defined_names(tree))
    if name not in defined and "*" not in defined:
        raise BadInput(f"{spec.origin} does not define {name!r}", value=import_path)
    match defined.get(name):
        case ast.AsyncFunctionDef(lineno=line):
            fix = "Write a plain function."
            raise BadInput("an async function", value=import_path, fix=fix, file=spec.origin, line=line)
        case ast.FunctionDef(args=arguments, lineno=line) if arguments.kwarg is None:
            accepted = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
            required = [argument.arg for argument in arguments.args][1 : -len(arguments.defaults) or None]
            if wrong := sorted({*kwargs} - {*accepted}) + sorted({*required} - {*kwargs}):
                fact = f"takes {', '.join(accepted)}; unexpected or missing in its kwargs: {', '.join(wrong)}"
                raise BadInput(fact, value=import_path, file=spec.origin, line=line)


def defined_names(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that code defines outside functions and classes; `*` stands for a star import."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).partition(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node
        else:
            pending += ast.iter_child_nodes(node)
