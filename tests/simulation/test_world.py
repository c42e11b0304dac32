"""Runs on simulated hosts, with everything that decides real: nothing is lost or trained twice, whatever fails."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from headrace.inference.schema import Health
from headrace.launch.errors import LaunchError
from headrace.rollout.version import Version
from tests.simulation.network import Link, Network, SimulatedHost
from tests.simulation.servers import SLOTS, Server
from tests.simulation.settings import Result, Settings
from tests.simulation.virtual_time import VirtualLoop
from tests.simulation.world import World

SMALL = {
    "hosts": 4, "gpus_per_host": 2, "trainer_hosts": 2, "spares": 1, "in_flight": 96, "batch_size": 32,
    "max_steps": 24, "mean_tokens": 1000, "step_s": 4.0, "tool_s": 2.0, "server_start_s": 15.0,
    "trainer_start_s": 10.0, "reboot_s": 60.0, "partition_share": 0.25, "partition_s": 30.0,
}  # fmt: skip
KINDS = {"server": 3.0, "host": 1.0, "link": 1.0, "trainer": 1.0, "orchestrator": 1.0}


def play(directory: Path, seed: int, **settings: object) -> Result:
    world = World(Settings(**{**SMALL, **settings}), directory, seed)
    try:
        return world.play()
    except LaunchError as error:
        raise AssertionError("\n".join([*world.view.messages, *world.errors, str(error)])) from error


def test_requests_that_are_aborted_together_free_their_slots() -> None:
    loop, rng = VirtualLoop(), random.Random(0)
    network, host = Network(loop, rng, {"here": Link()}), SimulatedHost("h")
    server = Server(network, host, "http://h", Version(0, 0), network.cross, str, rng, mean_tokens=1000)  # type: ignore[arg-type]
    requests = [loop.create_task(server.respond("/inference/v1/generate", b"")) for _ in range(2 * SLOTS)]
    loop.advance(1.0)
    assert msgspec.json.decode(server.health(), type=Health).running == SLOTS
    for request in requests:
        request.cancel()
    loop.advance(1.0)
    health = msgspec.json.decode(server.health(), type=Health)
    assert (health.running, health.waiting) == (0, 0)
    loop.run_until_complete(asyncio.gather(*requests, return_exceptions=True))
    loop.close()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_every_draw_is_trained_once_or_dropped_with_a_reason_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    result = play(tmp_path, seed, kills=6, kinds=KINDS)
    assert result.violations == []
    assert result.kills.total() == 7


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_thousand_kills_among_512_servers_lose_nothing(tmp_path: Path) -> None:
    large = {"hosts": 64, "gpus_per_host": 8, "trainer_hosts": 4, "in_flight": 10_000, "batch_size": 2048, "spares": 0}
    result = play(
        tmp_path,
        0,
        **large,
        max_steps=60,
        mean_tokens=6000,
        step_s=20.0,
        server_start_s=40.0,
        kills=1000,
        max_restarts=20,
    )
    assert result.violations == []
    assert result.kills.total() == 1001
