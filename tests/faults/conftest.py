"""Options of `make test-faults`."""

from __future__ import annotations

import random

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="of all random choices; that of a failed session replays it")
    parser.addoption("--flips", type=int, default=1000, help="bits that are flipped one by one")
    parser.addoption("--resumes", type=int, default=50, help="flips after which the run is resumed")
    parser.addoption("--kills", type=int, default=200, help="kills over all kinds of runs")


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> int:
    given = pytestconfig.getoption("--seed")
    seed = random.SystemRandom().randrange(1 << 31) if given is None else int(given)
    show(pytestconfig, f"seed {seed}: replay with --seed {seed}")
    return seed


def show(config: pytest.Config, text: str) -> None:
    """Print to the terminal although output is captured."""
    with config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{text}", flush=True)
