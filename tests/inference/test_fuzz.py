"""Very many mutated requests to a real server process; test_inference_server.py sends it a few among the fast tests."""

import pytest

from tests.inference import fuzzing

SEED = 0
GROWTH_BLOCKS = 4000
"""Of the idle server's Python over 40,000 requests: a tenth of what one object left behind by each request would be.
Caches with a limit may still fill."""
GROWTH_MALLOC_MB = 1.0
"""Of what C libraries have in use in the server: 25 bytes of each request."""
GROWTH_MB = 20
"""Of server and engine as the system sees them: half a KB of each request. Allocators keep what lies between."""


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_no_request_of_very_many_ends_in_a_5xx_and_memory_does_not_grow() -> None:
    outcome = fuzzing.main(50_000, SEED)
    assert not outcome.failures
    before, after = (outcome.memory[count] for count in (10_000, 50_000))
    assert after.blocks - before.blocks < GROWTH_BLOCKS
    assert after.malloc_mb - before.malloc_mb < GROWTH_MALLOC_MB
    assert after.server_mb + after.engine_mb - before.server_mb - before.engine_mb < GROWTH_MB
