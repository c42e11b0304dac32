"""Thousands of connections that send nothing, to a real server process."""

import resource
from pathlib import Path
from statistics import median

import pytest
from benchmarks.inference.hostile_clients import Hostile, measure

from headrace.machine import raise_open_file_limit
from tests.inference.fuzzing import running_server

IDLE = 5000
DEADLINE_S = 60
"""Long enough that all are open while the normal client is measured, also on a busy machine."""
GRACE_S = 10
"""For timers and the closing of sockets on a busy machine."""
LEFT_MB = 2.0
"""Of what the server has allocated after they are gone: tables that have grown for them, 400 bytes of each."""


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("limit", [4096, 2 * IDLE], ids=["the default limit", "a limit above"])
async def test_thousands_of_idle_connections_are_harmless_and_gone_after_their_deadline(limit: int, tmp_path: Path):
    raise_open_file_limit()
    if (files := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < IDLE + 500:
        pytest.skip(f"needs {IDLE + 500} open files in a process: the system allows {files}")
    http = {"header_timeout": DEADLINE_S, "max_unauthenticated": limit}
    with running_server(tmp_path, http=http) as endpoint:
        effect = await measure(endpoint, tmp_path, Hostile("idle", IDLE, b"", drips=False))
    before, beside, after = map(median, effect.latencies_ms)
    assert beside < 2 * max(before, after)
    assert effect.closed_after_s < DEADLINE_S + GRACE_S
    without, held, left = effect.memory
    assert held.blocks - without.blocks > min(limit, IDLE)  # all were still open
    assert left.blocks - without.blocks < IDLE / 10
    assert left.malloc_mb - without.malloc_mb < LEFT_MB
