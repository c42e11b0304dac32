"""A trainer that is killed at any moment, and the next one too: what comes out is what would have come out anyway."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("interval", [1, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.full)])
def test_a_trainer_killed_at_any_moment_is_continued_to_the_same_model_and_records(
    tmp_path: Path, tiny_model: Path, interval: int, stride: int
):
    script = Path(__file__).with_name("killed_trainer.py")
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, script, tmp_path, tiny_model, str(stride), str(interval)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
