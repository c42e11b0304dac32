"""The embedded engine on a GPU: attention and sampling kernels, compiled layers, graphs of whole steps.

What computes here needs triton, which comes with torch for GPUs, and is imported where there is one.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
from typing import Any

import torch

from headrace.inference.cuda_driver import DriverError
from headrace.inference.embedded.adapters import Adapters
from headrace.inference.embedded.cuda.storage import Storage
from headrace.inference.embedded.runner import Runner

log = logging.getLogger(__name__)


def make_cuda_runner(model: Any, blocks: int, adapters: Adapters, **settings: Any) -> Runner | None:
    """The GPU's own way to compute this model; None where it has none, and a warning says why.

    `settings` are those of `CudaRunner`. A GPU that is lost or full is nothing that another way would mend: that is
    raised.
    """
    obstacle = _obstacle(model)
    if obstacle is None:
        try:
            from headrace.inference.embedded.cuda.runner import CudaRunner

            return CudaRunner(model, blocks, adapters, **settings)
        except (torch.AcceleratorError, torch.OutOfMemoryError, DriverError):
            raise
        except Exception as error:  # of triton, a compiler, or a model with keys that its configuration does not tell
            obstacle = f"{type(error).__name__}: {error}"
        Storage.detach(model)
        gc.collect()  # the cache of the runner that failed is gone before another takes as much
    log.warning("sampling will be several times slower than it could be: %s", obstacle)
    return None


def _obstacle(model: Any) -> str | None:
    config = model.config.get_text_config()
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of the model's layers attend to the keys of others"
    if getattr(config, "global_head_dim", None) or getattr(config, "num_global_key_value_heads", None):
        return "the model's layers differ in the size of their keys"
    return None
