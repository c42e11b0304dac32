"""The embedded engine on a GPU: attention and sampling kernels, compiled layers, CUDA graphs of decode steps.

`runner` and the kernels need triton, which comes with torch for GPUs, and are imported only on a GPU.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
from typing import Any

import torch

from headrace.inference.cuda_driver import DriverError
from headrace.inference.embedded.adapters import Adapters
from headrace.inference.embedded.cuda.kv_storage import KVStorage
from headrace.inference.embedded.runner import Runner

log = logging.getLogger(__name__)


def make_cuda_runner(model: Any, blocks: int, adapters: Adapters, **settings: Any) -> Runner | None:
    """Return a `CudaRunner` with these settings; None, with a warning, if it does not support the model.

    A GPU that is lost or out of memory raises: another runner would fail, too.
    """
    config = model.config.get_text_config()
    if importlib.util.find_spec("triton") is None:
        obstacle = "the package triton is not installed"
    elif getattr(config, "num_kv_shared_layers", 0):
        obstacle = "some of the model's layers attend to the keys of others"
    elif getattr(config, "global_head_dim", None) or getattr(config, "num_global_key_value_heads", None):
        obstacle = "the model's layers differ in the size of their keys"
    else:
        try:
            from headrace.inference.embedded.cuda.runner import CudaRunner

            return CudaRunner(model, blocks, adapters, **settings)
        except (torch.AcceleratorError, torch.OutOfMemoryError, DriverError):
            raise
        except Exception as error:  # of triton, a compiler, or a model whose keys differ from its configuration
            obstacle = f"{type(error).__name__}: {error}"
        KVStorage.detach(model)
        gc.collect()  # frees the KV cache of the failed runner before another is allocated
    log.warning("sampling falls back to a runner that is several times slower: %s", obstacle)
    return None
