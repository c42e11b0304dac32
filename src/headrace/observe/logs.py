"""Log lines: a time, a level where it matters, and words. A launched process writes them to its own file."""

from __future__ import annotations

import logging
import sys


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        text = f"{self.formatTime(record, '%H:%M:%S')} {level}{record.getMessage()}"
        return text if record.exc_info is None else f"{text}\n{self.formatException(record.exc_info)}"


def setup_logging() -> None:
    """Log to standard error, which the launcher directs to a file."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("httpx", "uvicorn.access", "transformers", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
