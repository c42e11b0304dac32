"""Headrace: asynchronous reinforcement learning and distillation for language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.api.model import Model as Model
    from headrace.api.model import evaluate as evaluate
    from headrace.api.model import sample as sample
    from headrace.api.model import score as score
    from headrace.api.run import Run as Run
    from headrace.api.start import run as run
    from headrace.api.start import start as start

__version__ = "0.1.0"

_EXPORTS = {
    "Model": "model",
    "Run": "run",
    "evaluate": "model",
    "run": "start",
    "sample": "model",
    "score": "model",
    "start": "start",
}
"""The modules of `headrace.api`, which are imported at the first use: `import headrace` takes no time."""

__all__ = ["Model", "Run", "__version__", "evaluate", "run", "sample", "score", "start"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"headrace.api.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return __all__
