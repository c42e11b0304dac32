"""Where new weights wait until they are installed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

log = logging.getLogger(__name__)
T = TypeVar("T")


def staged(device: torch.device, size: int, make: Callable[[torch.device], T]) -> T:
    """What `make` makes, about that many bytes, on the device that it is told.

    That is an engine's GPU if it has plenty, since installing is then a matter of milliseconds; else the host. There is
    always room on the host: a trainer on the same GPU may take at any moment what was free just now.
    """
    if device.type == "cuda" and 2 * size < torch.cuda.mem_get_info(device)[0]:
        try:
            return make(device)
        except RuntimeError as error:
            if not _is_shortage(error):
                raise
            log.info("new weights wait on the host, since somebody else has taken the GPU's memory: %s", error)
        leave_staging(device)  # not before here: the error holds on to what was made
    return make(torch.device("cpu"))


def _is_shortage(error: RuntimeError) -> bool:
    """Of memory of the GPU. The library that multiplies takes its own, once, and fails in its own way."""
    return isinstance(error, torch.OutOfMemoryError) or "cublasCreate" in str(error)


def leave_staging(device: torch.device) -> None:
    """What waited there is installed and forgotten: on a GPU others may need the memory, which torch would keep."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
