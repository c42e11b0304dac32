"""Records on a disk that is full for a while."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.observe.metrics import History, MetricsCollector, MetricsLog, Tail, read_metrics


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


def test_metrics_of_several_hosts_are_collected_into_one_file_also_by_a_second_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADRACE_HOSTS", "2")
    path = tmp_path / "metrics.jsonl"
    trainer, orchestrator = MetricsLog(path, "trainer"), MetricsLog(path, "orchestrator")
    trainer.log(1, {"loss": 1.0})
    MetricsCollector(path).collect()
    restarted = MetricsLog(path, "trainer")  # while the first one still writes
    for log, value in ((trainer, 2.0), (orchestrator, 3.0), (restarted, 4.0)):
        log.log(2, {"loss": value})
    with open(restarted.path, "ab") as file:
        file.write(b'{"step": 3, "ti')  # a line that is being written
    collector = MetricsCollector(path)
    collector.collect()
    collector.collect()
    assert sorted(record["loss"] for record in read_metrics(path)) == [1.0, 2.0, 3.0, 4.0]
    with open(restarted.path, "ab") as file:
        file.write(b'me": 1.0, "loss": 5.0}\n')
    collector.close()
    assert sorted(record["loss"] for record in read_metrics(path)) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
