"""The size of a simulated run, what goes wrong in it, and what it came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.simulation.network import Link
from tests.simulation.servers import SLOTS, tokens_per_second

FAR = Link(latency_s=0.05, bandwidth=1e9, loss=0.01)
KILLS = {"server": 0.96, "host": 0.02, "link": 0.01, "trainer": 0.006, "orchestrator": 0.004}
"""Shares of the kinds of failures. `link`: a host is cut off for a while."""


@dataclass
class Settings:
    """Sizes and times, in seconds, of a simulated run."""

    hosts: int = 64
    gpus_per_host: int = 8
    """One server on each."""
    trainer_hosts: int = 4
    spares: int = 0
    in_flight: int = 10_000
    max_steps: int = 40
    batch_size: int = 2048
    group_size: int = 8
    max_async_level: int = 6
    max_off_policy_steps: int = 16
    checkpoint_interval: int = 5
    keep_rollouts: int = 4
    step_s: float = 30.0
    checkpoint_s: float = 1.0
    server_start_s: float = 40.0
    trainer_start_s: float = 60.0
    orchestrator_start_s: float = 5.0
    reboot_s: float = 120.0
    mean_tokens: int = 6000
    """Of a turn."""
    two_turns: float = 0.3
    """Share of the episodes with a second turn."""
    tool_s: float = 5.0
    weights_bytes: int = 10_000_000
    """An adapter's: the trainer's host sends it to every server."""
    uplink: float = 12.5e9
    """Bytes per second that the trainer's host sends."""
    max_restarts: int = 3
    """Of a process, without a new step in between."""
    kills: int = 0
    kinds: Mapping[str, float] = field(default_factory=lambda: KILLS)
    """Shares of the kinds of kills."""
    slow_share: float = 0.0
    slowness: float = 3.0
    far_share: float = 0.0
    far_link: Link = FAR
    partition_share: float = 0.0
    partition_s: float = 60.0

    @property
    def servers(self) -> int:
        return self.hosts * self.gpus_per_host

    @property
    def turns(self) -> float:
        return 1 + self.two_turns

    def ideal_rollouts_per_second(self) -> float:
        """Return what engines decode without failures, with the episodes in flight spread evenly over them."""
        per_engine = min(SLOTS, self.in_flight / self.servers)
        slow = self.slow_share * self.servers
        tokens = slow * tokens_per_second(per_engine, self.slowness)
        tokens += (self.servers - slow) * tokens_per_second(per_engine, 1.0)
        return min(tokens / (self.mean_tokens * self.turns), self.batch_size / self.step_s)


@dataclass
class Counters:
    """Sums at a moment."""

    time: float = 0.0
    decoding_s: float = 0.0
    training_s: float = 0.0


@dataclass
class Result:
    """What a run came to, from the first trained steps on."""

    settings: Settings
    rollouts_per_second: float
    servers_idle: float
    trainer_idle: float
    staleness: float
    retried: int
    kills: Counter[str]
    repeated_steps: int
    dropped: Counter[str]
    longest_stall_s: float
    simulated_s: float
    wall_s: float
    violations: list[str] = field(default_factory=list)
