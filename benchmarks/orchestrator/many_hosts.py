"""A run on many hosts in simulated time: what failures, slow nodes and bad links cost, and that nothing is lost.

    python -m benchmarks.orchestrator.many_hosts [--hosts 64] [--in-flight 10000] [--kills 1000] [--steps 30] [--rows R]

64 hosts with 8 servers each, 10,000 episodes in flight, a trainer on 4 hosts. Real are the supervisor, placement, the
leases of hosts, the orchestrator with its engine client, and every file of the run directory; hosts, links, engines and
training steps are simulated (tests/simulation). The columns:

    rollouts/s   trained per simulated second, and as a share of the ideal: no failures, episodes spread evenly
    idle         share of the servers' and of the trainer's time without work, restarts included
    stale        mean age of the trained tokens in optimizer steps
    retried      requests that were made again on another engine
    repeated     steps that were trained again from a checkpoint
    dropped      rollouts of training that were too old, or whose episode failed
    lost         draws that were lost or trained twice, by the audit and by SQL
    stall        longest time between two trained steps
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.simulation.settings import Result, Settings
from tests.simulation.world import World

MEMORY_DISK = Path("/dev/shm")
KILL_STEPS = 2
"""By how much longer a run with kills is, so that they are about two seconds apart."""
MAX_RESTARTS = 20
"""In runs with kills: a process may be killed several times before its next step."""
ROWS = {
    "no failures": {},
    "slow": {"slow_share": 0.05},
    "far": {"far_share": 0.25},
    "partition": {"partition_share": 0.25},
    "kills": {"kills": 1000},
    "all": {"kills": 1000, "slow_share": 0.05, "far_share": 0.25, "partition_share": 0.25},
}
NAMES = {
    "slow": "5% of nodes 3x slower",
    "far": "a quarter behind 100 ms, 1% loss",
    "partition": "a quarter cut off for 60 s",
    "all": "all together",
}
HEAD = (
    f"{'':34}{'servers':>8}{'in flight':>10}{'kills':>6}{'rollouts/s':>11}{'of ideal':>9}{'idle: servers':>14}"
    f"{'trainer':>8}{'stale':>6}{'retried':>8}{'repeated':>9}{'dropped':>8}{'lost':>5}{'stall s':>8}{'sim. s':>7}"
    f"{'wall s':>7}"
)


def line(name: str, result: Result) -> str:
    settings = result.settings
    share = result.rollouts_per_second / settings.ideal_rollouts_per_second()
    dropped = sum(count for reason, count in result.dropped.items() if reason != "max_steps")
    return (
        f"{NAMES.get(name, name):34}{settings.servers:>8}{settings.in_flight:>10,}{result.kills.total():>6,}"
        f"{result.rollouts_per_second:>11.1f}{share:>9.0%}{result.servers_idle:>14.0%}{result.trainer_idle:>8.0%}"
        f"{result.staleness:>6.1f}{result.retried:>8,}{result.repeated_steps:>9}{dropped:>8,}"
        f"{len(result.violations):>5}{result.longest_stall_s:>8.0f}{result.simulated_s:>7.0f}{result.wall_s:>7.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    arguments = parser.parse_args()
    # The same batches per second as with 64 hosts.
    batch_size = max(8, round(2048 * arguments.in_flight / 10_000 / 8) * 8)
    base = Settings(
        hosts=arguments.hosts,
        in_flight=arguments.in_flight,
        max_steps=arguments.steps,
        batch_size=batch_size,
        step_s=20.0,
    )
    print(HEAD, flush=True)
    for name in arguments.rows:
        changes = dict(ROWS[name])
        if "kills" in changes:
            steps = KILL_STEPS * arguments.steps
            changes |= {"kills": arguments.kills, "max_steps": steps, "max_restarts": MAX_RESTARTS}
        with tempfile.TemporaryDirectory(dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None) as directory:
            world = World(replace(base, **changes), Path(directory), arguments.seed)
            try:
                result = world.play()
            except BaseException:
                print(*world.view.messages[-30:], *world.errors, sep="\n")
                raise
            print(line(name, result), flush=True)
            for violation in result.violations[:5]:
                print(f"    {violation}")


if __name__ == "__main__":
    main()
