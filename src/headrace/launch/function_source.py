"""Check a user's function by its source, without importing its module, which may import torch."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import BadInput


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
        raise BadInput(f"no module named {module!r}", value=import_path)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # compiled, or a namespace package: only an import shows its names
    tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    defined = dict(_names(tree))
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


def _names(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that a module defines outside functions and classes; `*` stands for a star import."""
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
