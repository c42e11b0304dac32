"""Load a user's own code by import path, `package.module:name`, or by file, `path/to/file.py:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from headrace.errors import BadInput, suggest_similar

T = TypeVar("T")


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
        defined
        for defined, value in vars(module).items()
        if not defined.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return suggest_similar(name, own) or (f"It defines {', '.join(own)}." if own else None)


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
    """Import every module of a package, so that each registers what it declares; a module has none."""
    for module in pkgutil.iter_modules(getattr(package, "__path__", ()), f"{package.__name__}."):
        importlib.import_module(module.name)


def load_function(import_path: str, kwargs: Mapping[str, Any], what: str) -> Callable[..., Any]:
    """Return a user's function with its kwargs bound; it takes one more argument. `what` is for errors."""
    function = load(import_path, what)
    check_kwargs(function, (None,), kwargs, what, import_path)
    if inspect.iscoroutinefunction(function):
        fix = "Write a plain function, or a subclass of headrace.algorithms.base.Algorithm, whose hooks may wait."
        raise BadInput("it is an async function, which nothing awaits", key=what, value=import_path, fix=fix)
    return partial(function, **kwargs)


def load_class(import_path: str, base: type[T], args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str) -> type[T]:
    """Return a user's subclass of `base` that takes these arguments; it is not constructed. `what` is for errors."""
    kind = load(import_path, what)
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise BadInput(f"not a subclass of {base.__module__}.{base.__name__}", key=what, value=import_path)
    check_kwargs(kind, args, kwargs, what, import_path)
    return kind


def check_kwargs(
    called: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str, import_path: str
) -> None:
    """Raise `BadInput` if `called` does not take these arguments; it is not called."""
    try:
        inspect.signature(called).bind(*args, **kwargs)
    except TypeError as error:
        raise BadInput(f"it does not take these kwargs: {error}", key=what, value=import_path) from error


def name_of(function: Callable[..., Any]) -> str:
    """Return the import path of a function: `package.module:function`."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"
