"""Where things are in a run directory."""

from __future__ import annotations

from pathlib import Path

from headrace.transport.batches import BatchStore
from headrace.transport.files import MARKER
from headrace.transport.probes import ProbeStore
from headrace.transport.token_exports import TokenExports
from headrace.transport.weights import WeightStore


class RunDir:
    """Paths of one run. Every process of the run, and everyone who reads it later, goes through here."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.toml"
        self.code_folders = root / "code_folders.json"
        self.logs = root / "logs"
        self.status = root / "status"
        self.metrics = root / "metrics.jsonl"
        self.heartbeat = root / "heartbeat.json"
        self.rollouts = root / "rollouts"
        self.checkpoints = root / "checkpoints"
        self.endpoints = root / "endpoints"
        self.device_lock = root / "turns"
        self.journal = root / "journal.sqlite"
        self.summary = root / "summary.md"
        self.plot = root / "reward.svg"
        self.final_model = root / "model"
        self.batches = BatchStore(root / "batches")
        self.weights = WeightStore(root / "weights")
        self.probes = ProbeStore(root / "probes")
        self.tokens = TokenExports(root / "tokens")

    def latest_checkpoint_step(self) -> int:
        """The step of the newest complete checkpoint; 0 if there is none."""
        complete = self.checkpoints.glob(f"step-*/{MARKER}")
        return max((int(marker.parent.name.removeprefix("step-")) for marker in complete), default=0)
