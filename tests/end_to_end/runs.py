"""Real runs: `headrace` as a user types it, its processes, sockets and files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

RUN_FILE = """
output_dir = "{output}"
max_steps = 3
seq_len = 48

[model]
name = "{model}"

[trainer.optim]
lr = 1e-3

[trainer.ckpt]
interval = 2

[orchestrator]
batch_size = 16
group_size = 4

[orchestrator.train.sampling]
max_tokens = 8

[[orchestrator.train.env]]
id = "tests.end_to_end.environments:Letters"
name = "letters"

[orchestrator.eval]
interval = 2
num_examples = 4

[orchestrator.eval.sampling]
max_tokens = 8

[[orchestrator.eval.env]]
id = "tests.end_to_end.environments:Letters"
name = "letters"
"""


def write_run_file(directory: Path, model: Path, output: Path | None = None) -> Path:
    path = directory / "rl.toml"
    path.write_text(RUN_FILE.format(output=output or directory / "run", model=model))
    return path


def start(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`headrace ARGUMENTS` in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "headrace", *map(str, arguments)],
        cwd=REPOSITORY,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def headrace(*arguments: object, timeout: float = 180) -> tuple[int, str]:
    """`headrace ARGUMENTS` to its end: exit status and output."""
    return finish(start(*arguments), timeout)


def finish(process: subprocess.Popen[str], timeout: float = 180) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"did not end within {timeout} s:\n{output}") from None
    return process.returncode, output


def wait_until(condition: Callable[[], object], what: str, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.02)


def processes_of(output: Path) -> dict[str, int]:
    """The live processes of a run by name, from their status files."""
    from headrace.observe.status import StatusReader

    if not (output / "status").is_dir():
        return {}
    return {name: status.pid for name, status in StatusReader(output / "status").read().items() if is_alive(status.pid)}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
