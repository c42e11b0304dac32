"""The content of `heartbeat.json`, which the launcher of a run rewrites every few seconds."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)


class HeartbeatContent(msgspec.Struct):
    """The content of `heartbeat.json`. Times are seconds since 1970; only their difference is a duration."""

    time: float = 0.0
    pid: int = 0
    """Process id of the launcher."""
    state: str = ""
    """`running`, `finished`, `stopped` (can be resumed) or `failed`."""
    step: int = 0
    last_progress: float = 0.0
    """When a step or an evaluation was last recorded, or the launcher started."""
    problem: str = ""
    """Why the run makes no progress, or why it failed."""
    host: str = ""
    """Name of the launcher's host."""
    restarts: dict[str, str] = msgspec.field(default_factory=dict)
    """By process: how it ended before its restart, if the run has not got further since."""
    last_sign: float = 0.0
    """When a process last showed progress of any kind; 0 in files of older versions."""
    longest_quiet_s: float = 0.0
    """Longest time between two such signs in the last ten steps, without starts, compilation and checkpoints."""


def read_heartbeat(path: Path) -> HeartbeatContent | None:
    """Return the last heartbeat of a run; None if there is none, or if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=HeartbeatContent)
    except FileNotFoundError:
        return None
    except ValueError as error:
        log.warning("%s is damaged and left out: %s", path, error)
        return None
