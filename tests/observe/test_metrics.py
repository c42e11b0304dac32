"""Records on a disk that is full for a while."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.observe.metrics import History, MetricsLog, Tail


def test_what_does_not_fit_on_the_disk_raises_and_costs_no_other_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, write = 200, os.write

    def limited(descriptor: int, content: bytes) -> int:
        left = room - os.fstat(descriptor).st_size
        if left <= 0:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[:left])

    monkeypatch.setattr(os, "write", limited)
    log = MetricsLog(tmp_path / "metrics.jsonl", "trainer")
    log.log(1, {"loss": 0.5})
    with pytest.raises(OSError, match="No space left"):
        log.log(2, {"loss": 0.5, "note": "x" * 200})
    room = 10_000
    log.log(3, {"loss": 0.5})
    assert [*History(Tail(log.path).read()).trained] == [1, 3]
