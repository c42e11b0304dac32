"""The newest version in memory of the GPU that engines on the same GPU can open, one memory for all versions.

It is either written or read. An engine reads for milliseconds, so that a moment is waited where it still does when the
next version is due. Where that is not enough, the version is not written here and is to be had from the host instead:
no engine holds training up, and none ever copies half of one version and half of the next. A second row to change
places with would cost two more bytes of the GPU's memory for each parameter, for a case that is rare.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.inference.weights.ipc import ExportedMemory

MOMENT = 0.5
"""Seconds that training waits for engines to read what they have begun to."""


class SharedRow:
    """The trainer's thread vacates, writes and fills it; the threads that serve engines lend it.

    Its memory goes with this process: of an engine that has it open nothing is known once its connection is cut.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = ExportedMemory(size, device)
        self.stream: torch.cuda.Stream | None = None
        """Where it is copied to the host while training goes on."""
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._changed = threading.Condition()
        self._content: object | None = None
        self._readers = 0

    @property
    def bytes(self) -> Tensor:
        return self._memory.bytes

    def vacate(self) -> bool:
        """Before it is written: whether nobody reads it. Then nobody is lent it until it is filled."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._readers, MOMENT):
                return False
            self._content = None
        if self.stream is not None:
            self.stream.synchronize()  # the copy of what it held began a step ago
        return True

    def fill(self, content: object) -> None:
        """What was written is all there, and this is what it is called."""
        with self._changed:
            self._content = content

    @contextlib.contextmanager
    def lent(self, content: object) -> Iterator[str | None]:
        """What opens it, in hexadecimal, for a reader inside the context; None if it holds something else by now."""
        with self._changed:
            is_here = self._content is content
            self._readers += is_here
        try:
            yield self._memory.handle.hex() if is_here else None
        finally:
            with self._changed:
                self._readers -= is_here
                self._changed.notify_all()
