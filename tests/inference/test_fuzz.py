"""Mutated requests to a real server process: none ends in a 5xx, hangs, or is left in the engine."""

import pytest

from headrace.inference.client.engine_client import EngineClient
from headrace.transport.endpoint import read_endpoints
from headrace.transport.run_dir import RunDir
from tests.inference import fuzzing

SEED = 0
GROWTH_BLOCKS = 4000
"""Of the idle server's Python over 40,000 requests: a tenth of what one object left behind by each request would be.
Caches with a limit may still fill."""
GROWTH_MALLOC_MB = 1.0
"""Of what C libraries have in use in the server: 25 bytes of each request."""
GROWTH_MB = 20
"""Of server and engine as the system sees them: half a KB of each request. Allocators keep what lies between."""


async def test_no_request_ends_in_a_5xx_or_is_left_behind(served_run: RunDir) -> None:
    client = EngineClient(served_run.endpoints)
    await client.wait_ready(90.0)
    await client.close()
    (endpoint,) = read_endpoints(served_run.endpoints).values()
    outcome = await fuzzing.fuzz(endpoint, range(400), SEED)
    assert not outcome.failures
    assert outcome.statuses["200"] > 40 and outcome.statuses["400"] > 40


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_no_request_of_very_many_ends_in_a_5xx_and_memory_does_not_grow() -> None:
    outcome = fuzzing.main(50_000, SEED)
    assert not outcome.failures
    before, after = (outcome.memory[count] for count in (10_000, 50_000))
    assert after.blocks - before.blocks < GROWTH_BLOCKS
    assert after.malloc_mb - before.malloc_mb < GROWTH_MALLOC_MB
    assert after.server_mb + after.engine_mb - before.server_mb - before.engine_mb < GROWTH_MB
