"""List functions of fewer than six lines with one caller: `python scripts/one_caller_helpers.py [FOLDER]`.

Counted are private and public functions and methods of `src/headrace` whose body (docstring left out) has fewer than
six lines and that one place in the source refers to. Left out: dunder methods, functions inside functions, and what
a framework calls through a decorator (validators, routes).
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "headrace"
MAX_LINES = 5
PLAIN = {"property", "staticmethod", "classmethod", "contextmanager"}
"""Decorators that leave a function one that our code calls."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_in(tree: ast.AST) -> Iterator[Function]:
    """Yield the functions and methods of a module, functions inside functions left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef | ast.If | ast.Try):
            yield from functions_in(node)


def body_lines(function: Function) -> int:
    """Return the number of lines of a function's body without its docstring."""
    statements = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return statements[-1].end_lineno - statements[0].lineno + 1 if statements else 0


def references_in(tree: ast.AST) -> Counter[str]:
    """Count the names and attributes that a module reads; imports and definitions are not counted."""
    nodes = ast.walk(tree)
    return Counter(
        n.id if isinstance(n, ast.Name) else n.attr for n in nodes if isinstance(n, ast.Name | ast.Attribute)
    )


def one_caller_helpers(folder: Path) -> list[str]:
    """Return `path:line name` of each short function in `folder` that is referred to once.

    A private function is looked for in its own module, a public one in the whole source.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    own = {path: references_in(tree) for path, tree in trees.items()}
    everywhere = sum(own.values(), Counter())
    return [
        f"{path.relative_to(SOURCE)}:{function.lineno} {function.name}"
        for path, tree in trees.items()
        if path.is_relative_to(folder)
        for function in functions_in(tree)
        if not function.name.startswith("__") and {ast.unparse(name) for name in function.decorator_list} <= PLAIN
        if (own[path] if function.name.startswith("_") else everywhere)[function.name] == 1
        if 0 < body_lines(function) <= MAX_LINES
    ]


if __name__ == "__main__":
    helpers = one_caller_helpers(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else SOURCE)
    print("\n".join([*helpers, f"{len(helpers)} functions of fewer than {MAX_LINES + 1} lines with one caller"]))
