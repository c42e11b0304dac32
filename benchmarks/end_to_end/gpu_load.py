"""How busy the GPU is while a run goes on, by the driver: the share of time with any kernel on it."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from types import TracebackType

QUERY = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "--id=0", "--loop-ms=200"]


class GpuLoad:
    """Samples of the load, five a second from entering to leaving; none on a machine without a GPU."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> GpuLoad:
        if shutil.which(QUERY[0]) is None:
            return self
        self._process = subprocess.Popen(QUERY, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip().isdigit():
                self._samples.append((time.time(), float(line) / 100))

    def share(self, start: float, end: float) -> float:
        """The mean between two moments of the clock; NaN where nothing was sampled."""
        within = [busy for moment, busy in self._samples if start <= moment <= end]
        return sum(within) / len(within) if within else float("nan")
