"""One GPU buffer with the newest version, which engines on the same GPU open by CUDA IPC.

It is either written or read. An engine reads for milliseconds; the trainer waits up to `READERS_TIMEOUT_S` for readers
before it writes the next version. If that is not enough, the version is not written here and engines fetch it from the
host instead: no engine blocks training, and none copies a mix of two versions. A second buffer would cost two more
bytes of GPU memory per parameter, for a rare case.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.inference.weights.ipc import ExportedMemory

READERS_TIMEOUT_S = 0.5


class SharedBuffer:
    """The buffer: the trainer's thread writes it, the threads that serve engines lend it to readers.

    Its memory lives as long as this process: an engine may still have it open after its connection is closed.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = ExportedMemory(size, device)
        self.stream: torch.cuda.Stream | None = None
        """The stream that copies it to the host during training."""
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._changed = threading.Condition()
        self._content: object | None = None
        self._readers = 0

    @property
    def bytes(self) -> Tensor:
        return self._memory.bytes

    def begin_write(self) -> bool:
        """Wait for readers; return whether there are none. If so, there are no new readers until `end_write`."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._readers, READERS_TIMEOUT_S):
                return False
            self._content = None
        if self.stream is not None:
            self.stream.synchronize()  # the copy of the last version began a step ago
        return True

    def end_write(self, content: object) -> None:
        """Make the written content available to readers of `content`."""
        with self._changed:
            self._content = content

    @contextlib.contextmanager
    def lent(self, content: object) -> Iterator[str | None]:
        """Yield the IPC handle, hexadecimal, to read `content` inside the context; None if it has other content."""
        with self._changed:
            is_here = self._content is content
            self._readers += is_here
        try:
            yield self._memory.handle.hex() if is_here else None
        finally:
            with self._changed:
                self._readers -= is_here
                self._changed.notify_all()
