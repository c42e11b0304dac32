"""Loading of a user's own code by import path, `package.module:name`, or by file, `path/to/file.py:name`."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import BadInput


def load(path: str, key: str | None) -> Any:
    """Return the object at `path`; errors name the run file's `key` that was set to it, if there is one."""
    module, separator, name = path.partition(":")
    if not (module and separator and name):
        raise BadInput(
            "not an import path", key=key, value=path, fix="Write package.module:Name or path/to/file.py:Name."
        )
    try:
        loaded = load_file(module) if module.endswith(".py") else importlib.import_module(module)
        if hasattr(loaded, name):
            return getattr(loaded, name)
    except (ImportError, AttributeError) as error:
        fix = None
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            fix = f"Install it, or put {error.name}.py in the working directory or beside the run file."
        raise BadInput(f"cannot be imported: {error}", key=key, value=path, fix=fix) from error
    fact = f"{getattr(loaded, '__file__', None) or module} does not define {name!r}"
    raise BadInput(fact, key=key, value=path, fix=_similar_name(loaded, name))


def _similar_name(module: ModuleType, name: str) -> str | None:
    """Return the nearest name that the module itself defines, else all of them, as a sentence."""
    own = [
        known
        for known, value in vars(module).items()
        if not known.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    if close := difflib.get_close_matches(name, own, n=1):
        return f"Did you mean {close[0]!r}?"
    return f"It defines {', '.join(own)}." if own else None


def load_file(file: str) -> ModuleType:
    """Import a file as a module, once per process.

    A relative path is looked up in the working directory, then in the folders of `sys.path`, among which are those of
    the run files. A file that lies directly in such a folder is the module of its name.
    """
    folders = [Path(folder or ".") for folder in sys.path]
    match = next((path for folder in (Path("."), *folders) if (path := folder / file).is_file()), None)
    if match is None:
        raise ImportError(f"no file {file} in {Path.cwd()} or in a folder of sys.path")
    path = match.resolve()
    if path.stem.isidentifier() and path.parent in {folder.resolve() for folder in folders}:
        module = importlib.import_module(path.stem)
        if getattr(module, "__file__", None) and Path(str(module.__file__)).resolve() == path:
            return module
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "a file that ends with .py has a loader"
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def import_declarations(package: ModuleType) -> None:
    """Import every module of a package, so that each registers what it declares."""
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
