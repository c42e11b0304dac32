"""Published weights in a real vLLM without our server around it, and with a head that is not tied."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import REPOSITORY
from tests.vllm.conftest import PYTHON


@pytest.mark.timeout(300)
def test_vllm_samples_from_published_weights_by_file_and_over_the_link(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)]),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "HEADRACE_TRAINER_PYTHON": sys.executable,
    }
    done = subprocess.run(
        [PYTHON, "-m", "tests.vllm.weights_program", str(tmp_path), "own", "stream"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert "version 0-3 after what was refused" in done.stdout
