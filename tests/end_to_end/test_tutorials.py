"""The tutorials of docs/tutorials, as a reader follows them: files are written, commands and code run in order."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import REPOSITORY
from tests.test_docs_blocks import blocks_of

TUTORIALS = {
    "environment.md": "outputs/capitals",
    "reward.md": "outputs/capitals-brief",
    "algorithm.md": "outputs/best",
    "distil.md": "outputs/opd",
    "cluster.md": "outputs/reverse-text",
    "read-a-run.md": "page/index.html",
}
"""What each leaves behind; the first is a notebook (tests/view/test_notebook.py), and one-gpu.md needs a GPU."""


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_can_be_followed_to_its_end(page: str, tmp_path: Path):
    script = ["set -eum"]
    for block in blocks_of(REPOSITORY / "docs" / "tutorials" / page):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        elif block.language == "bash":
            script.append(block.text)
        elif block.language == "python":
            script.append(f"python - <<'END'\n{block.text}END")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env={**os.environ, "PATH": programs},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=1700)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    assert (tmp_path / TUTORIALS[page]).exists()
