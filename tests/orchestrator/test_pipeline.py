"""Every decision of a run under random traffic in simulated time. A failing seed replays exactly."""

import logging
from typing import Any

import pytest

from tests.orchestrator.simulation import Simulation

CHUNK = 100


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)


def chunks(first: int, last: int, size: int = CHUNK) -> list[Any]:
    """The first seed of each chunk from `first` to `last`; all but the first chunk belong to the long proofs."""
    return [pytest.param(seed, marks=pytest.mark.full if seed > first else ()) for seed in range(first, last, size)]


@pytest.mark.parametrize("first", chunks(0, 6000))
async def test_random_schedules_lose_nothing_leak_nothing_and_end(first: int):
    for seed in range(first, first + CHUNK):
        simulation = Simulation(seed)
        await simulation.run()
        simulation.check_end()


@pytest.mark.parametrize("first", chunks(6000, 10_000))
async def test_random_schedules_with_kills_and_restarts_account_for_every_draw_once(first: int):
    for seed in range(first, first + CHUNK):
        simulation = Simulation(seed, kills=3)
        await simulation.run()
        simulation.check_end()


@pytest.mark.parametrize("first", chunks(20_000, 21_000, 20))
async def test_at_level_0_a_run_that_was_killed_draws_credits_and_trains_what_an_uninterrupted_one_does(first: int):
    for seed in range(first, first + 20):
        whole, killed = Simulation(seed, on_policy=True), Simulation(seed, kills=3, on_policy=True)
        for simulation in (whole, killed):
            await simulation.run()
            simulation.check_end()
        assert killed.journal.draws() == whole.journal.draws()
        assert list(killed.journal.results()) == list(whole.journal.results())
        assert killed.shipped == whole.shipped
        assert killed.journal.algorithm_states() == whole.journal.algorithm_states()
        assert killed.journal.totals() == whole.journal.totals()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))])
async def test_more_than_a_week_of_traffic_with_twenty_kills_adds_up(seed: int):
    simulation = Simulation(seed, kills=20, max_steps=200, pace=600.0)
    began = simulation.now
    await simulation.run()
    simulation.check_end()
    assert simulation.now - began > 7 * 86400
    assert simulation.processes == 21


async def test_a_seed_replays_exactly():
    first, second = Simulation(17, kills=3), Simulation(17, kills=3)
    for simulation in (first, second):
        await simulation.run()
    assert first.now == second.now
    assert first.journal.draws() == second.journal.draws()
    assert first.journal.algorithm_states() == second.journal.algorithm_states()
