"""Log lines: a time, a level where it matters, and words. A launched process writes them to its own file."""

from __future__ import annotations

import logging
import sys


class _Format(logging.Formatter):
    def __init__(self, speaker: str) -> None:
        super().__init__()
        self._speaker = f"{speaker}: " if speaker else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        text = f"{self.formatTime(record, '%H:%M:%S')} {level}{self._speaker}{record.getMessage()}"
        return text if record.exc_info is None else f"{text}\n{self.formatException(record.exc_info)}"


def setup_logging(speaker: str = "") -> None:
    """Log to standard error, which the launcher directs to a file.

    A `speaker` is named in each line, and says only what is wrong: it is one of several that do the same.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Format(speaker))
    logging.basicConfig(level=logging.WARNING if speaker else logging.INFO, handlers=[handler], force=True)
    for noisy in ("httpx", "uvicorn.access", "transformers", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
