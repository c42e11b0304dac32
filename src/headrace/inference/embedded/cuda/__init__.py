"""The embedded engine on a GPU: attention and sampling kernels, compiled layers, graphs of whole steps.

Everything here needs triton, which comes with torch for GPUs, and is imported where there is one.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

log = logging.getLogger(__name__)


def can_run_on_cuda(model: Any) -> bool:
    """Whether the GPU's own kernels compute this model; where not, a warning says why."""
    obstacle = _obstacle(model)
    if obstacle is not None:
        log.warning("sampling will be several times slower than it could be: %s", obstacle)
    return obstacle is None


def _obstacle(model: Any) -> str | None:
    config = model.config.get_text_config()
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of the model's layers attend to the keys of others"
    if getattr(config, "global_head_dim", None) or getattr(config, "num_global_key_value_heads", None):
        return "the model's layers differ in the size of their keys"
    return None
