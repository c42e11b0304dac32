"""The weights link over NCCL, on a machine with a GPU: versions arrive, and each side survives the other."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_versions_travel_between_gpus_and_a_dead_peer_closes_only_the_connection(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.inference.nccl_link_program", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert "the engine follows another trainer" in done.stdout
