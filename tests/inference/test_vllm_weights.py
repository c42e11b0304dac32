"""Published weights in a real vLLM, for which an interpreter that has it must be named in the environment."""

import os
import subprocess
from pathlib import Path

import pytest

VARIABLE = "HEADRACE_VLLM_PYTHON"
PYTHON = os.environ.get(VARIABLE, "")
REPOSITORY = Path(__file__).parents[2]
FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def has_vllm() -> bool:
    return bool(PYTHON) and subprocess.run([PYTHON, "-c", FIND], check=False).returncode == 0


@pytest.mark.skipif(not has_vllm(), reason=f"{VARIABLE} names no interpreter with vLLM")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("head", ["tied", "own"])
def test_vllm_samples_from_published_weights_by_file_and_over_the_link(head: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)]),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [PYTHON, "-m", "tests.inference.vllm_weights_program", str(tmp_path), head, "stream"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert "version 0-3 after what was refused" in done.stdout
