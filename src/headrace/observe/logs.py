"""Format of log lines: time, level unless it is INFO, and message. Each launched process has its own log file."""

from __future__ import annotations

import logging
import sys


class _Format(logging.Formatter):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = f"{prefix}: " if prefix else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        text = f"{self.formatTime(record, '%H:%M:%S')} {level}{self._prefix}{record.getMessage()}"
        return text if record.exc_info is None else f"{text}\n{self.formatException(record.exc_info)}"


def setup_logging(prefix: str = "") -> None:
    """Log to standard error, which the launcher redirects to a file.

    With a `prefix`, for one of several equal processes, each line has it and only warnings and errors are logged.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format(prefix))
    logging.basicConfig(level=logging.WARNING if prefix else logging.INFO, handlers=[handler], force=True)
    for noisy in ("httpx", "uvicorn.access", "transformers", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
