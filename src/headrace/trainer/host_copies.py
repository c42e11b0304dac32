"""Host memory that checkpoints and published versions take; computed without torch, for plans before a run starts.

A checkpoint takes one copy of its tensors in host memory, from which it is written while training continues, if that
fits. Otherwise it is streamed to disk through a few buckets, while training waits.

Pinning memory is 20 times slower than copying to it. So memory is pinned ahead, while the layers are compiled, and
reused: torch keeps pinned memory that is free, and all of it is requested in buckets of one size.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from headrace.config.trainer import AnyOptimConfig

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

BUCKET_BYTES = 1 << 26
"""A power of two, since torch rounds pinned memory up to one."""
STREAM_BUCKETS = 8
"""Buckets of a streamed checkpoint, per rank."""
MAX_SHARE_OF_FREE = 0.75
"""Share of a host's free memory that the copy of a checkpoint may take; the rest is for memory that grows later."""
PUBLISHED_COPIES = 2
"""Versions in host memory: the one that every engine has, for engines that restart, and the next one."""


def checkpoint_bytes(trained_parameters: int, optim: AnyOptimConfig, *, has_reference: bool = False) -> int:
    """Return the bytes of a checkpoint's tensors, on disk as in memory; after Muon, at most so many."""
    return trained_parameters * (4 + optim.saved_state_bytes + (4 if has_reference else 0))


def fits_host(size: int, free: int) -> bool:
    """Return whether a host with `free` bytes of memory has room for a copy of its `size` bytes of a checkpoint."""
    return size <= MAX_SHARE_OF_FREE * free


def save_bytes(size: int, free: int, ranks: int = 1) -> int:
    """Return the bytes of host memory that saving takes on a host with this many ranks: a copy, or a few buckets."""
    buckets = -(-size // BUCKET_BYTES)
    return BUCKET_BYTES * (buckets if fits_host(size, free) else min(buckets, STREAM_BUCKETS * ranks))


def pin_ahead(size: int, device: torch.device) -> threading.Thread:
    """Start a thread that pins `size` bytes for copies from a GPU, and leaves them to torch for its next requests."""
    import torch

    def pin() -> None:
        start = time.monotonic()
        try:
            with torch.cuda.device(device):  # of this thread
                buckets = [
                    torch.empty(BUCKET_BYTES, dtype=torch.uint8, pin_memory=True)
                    for _ in range(-(-size // BUCKET_BYTES))
                ]
        except RuntimeError as error:
            log.warning("no more host memory can be pinned ahead, so the first copies will be slow: %s", error)
            return
        taken = len(buckets) * BUCKET_BYTES / 1e9
        log.info("%.1f GB of host memory is pinned in %.1f s", taken, time.monotonic() - start)

    thread = threading.Thread(target=pin, name="pin-ahead", daemon=True)
    thread.start()
    return thread
