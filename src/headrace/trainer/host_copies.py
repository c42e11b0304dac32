"""Host memory that checkpoints and published versions take, without torch: also for plans before a run starts.

A checkpoint takes one copy of its tensors in host memory, from which it is written while training continues, if that
fits. Otherwise it is streamed to disk through a few buckets, while training waits.
"""

from __future__ import annotations

from headrace.config.trainer import AnyOptimConfig

BUCKET_BYTES = 1 << 26
"""A power of two, since torch rounds pinned memory up to one."""
STREAM_BUCKETS = 8
"""Buckets of a streamed checkpoint, per rank."""
MAX_SHARE_OF_FREE = 0.75
"""Of a host's free memory that the copy of a checkpoint may take; the rest is for everything that grows later."""
PUBLISHED_COPIES = 2
"""Versions in host memory: the one that every engine has, for engines that restart, and the next one."""


def checkpoint_bytes(trained_parameters: int, optim: AnyOptimConfig) -> int:
    """Return the bytes of a checkpoint's tensors, on disk as in memory; after Muon, at most so many."""
    return trained_parameters * (4 + optim.saved_state_bytes)


def fits_host(size: int, free: int) -> bool:
    """Return whether a host with `free` bytes of memory has room for a copy of its `size` bytes of a checkpoint."""
    return size <= MAX_SHARE_OF_FREE * free


def save_bytes(size: int, free: int, ranks: int = 1) -> int:
    """Return the bytes of host memory that saving takes on a host with this many ranks: a copy, or a few buckets."""
    buckets = -(-size // BUCKET_BYTES)
    return BUCKET_BYTES * (buckets if fits_host(size, free) else min(buckets, STREAM_BUCKETS * ranks))


def publish_bytes(parameters: int, compute_bytes: int) -> int:
    """Return the bytes of host memory for published versions of a model whose engines fetch them from memory."""
    return PUBLISHED_COPIES * parameters * compute_bytes
