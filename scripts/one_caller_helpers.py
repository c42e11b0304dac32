"""List functions of fewer than six lines with one caller: `python scripts/one_caller_helpers.py [FOLDER]`.

Counted are private and public functions and methods of `src/headrace` whose body (docstring left out) has fewer than
six lines and that one place in the source refers to. Left out: dunder methods, functions inside functions, and what
a framework calls through a decorator (validators, routes).

The last line also says how many of them cannot be written where they are used: callbacks, which are passed and not
called there, and methods that several classes define.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
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


def names_of(nodes: Iterable[ast.AST]) -> Counter[str]:
    """Count the names and attributes among nodes; imports and definitions are not counted."""
    return Counter(
        n.id if isinstance(n, ast.Name) else n.attr for n in nodes if isinstance(n, ast.Name | ast.Attribute)
    )


def one_caller_helpers(folder: Path) -> dict[str, bool]:
    """Return `path:line name` of each short function in `folder` that is referred to once, and whether it is fixed.

    A private function is looked for in its own module, a public one in the whole source. Fixed are callbacks and
    methods that several classes define.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    read = {path: names_of(ast.walk(tree)) for path, tree in trees.items()}
    called = {p: names_of(n.func for n in ast.walk(tree) if isinstance(n, ast.Call)) for p, tree in trees.items()}
    all_read, all_called = sum(read.values(), Counter()), sum(called.values(), Counter())
    definitions = Counter(function.name for tree in trees.values() for function in functions_in(tree))
    helpers = {}
    for path, tree in trees.items():
        for function in functions_in(tree) if path.is_relative_to(folder) else ():
            name, decorators = function.name, {ast.unparse(each) for each in function.decorator_list}
            private = name.startswith("_")
            if name.startswith("__") or not decorators <= PLAIN or not 0 < body_lines(function) <= MAX_LINES:
                continue
            if (read[path] if private else all_read)[name] == 1:
                is_passed = "property" not in decorators and not (called[path] if private else all_called)[name]
                place = f"{path.relative_to(SOURCE)}:{function.lineno} {name}"
                helpers[place] = is_passed or (not private and definitions[name] > 1)
    return helpers


if __name__ == "__main__":
    helpers = one_caller_helpers(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else SOURCE)
    print(
        "\n".join(
            f"{place}{' (callback or method of several classes)' if fixed else ''}" for place, fixed in helpers.items()
        )
    )
    fixed = sum(helpers.values())
    print(
        f"{len(helpers)} functions of fewer than {MAX_LINES + 1} lines with one caller: {fixed} of them callbacks or "
        f"methods of several classes, {len(helpers) - fixed} others"
    )
