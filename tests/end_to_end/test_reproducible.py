"""A run without asynchrony is a function of its seed."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from headrace.transport.run_dir import RolloutKind, RunDir
from tests.end_to_end.runs import finish, start, write_run_file

pytestmark = pytest.mark.timeout(400)

COMPARED = ["task_key", "reward", "advantage_mean", "messages"]


def test_at_level_0_the_same_seed_gives_the_same_rollouts_and_the_same_model_to_the_last_bit(
    tmp_path: Path, tiny_model: Path
):
    runs = [RunDir(tmp_path / name) for name in ("first", "second")]
    for run in runs:
        file = write_run_file(tmp_path, tiny_model, run.root)
        code, output = finish(start("rl", file, "--orchestrator.max_async_level", 0, "--seed", 5))
        assert code == 0, output
    first, second = ((run.final_model / "model.safetensors").read_bytes() for run in runs)
    tables = [
        [pq.read_table(path).select(COMPARED) for path in RolloutKind.TRAIN.files(run.rollouts).values()]
        for run in runs
    ]
    assert tables[0] == tables[1]
    assert first == second
