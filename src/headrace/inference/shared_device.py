"""What a server knows of a trainer that computes on the same device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SharedDevice:
    """The device of one trainer and `servers` engines."""

    turns: Path | None
    """The directory in which they say whose turn it is; None: all compute at once."""
    trainer_bytes: float
    """Per parameter of the model, what the trainer keeps there, activations aside: with turns between its steps."""
    servers: int = 1
