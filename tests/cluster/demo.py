"""The demo, shortened: examples/reverse-text with a weaker starting point and a few steps of small batches."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from headrace.transport.run_dir import RunDir
from tests.cluster.hosts import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "reverse-text"
SFT_STEPS = 60
"""Enough for a model that sometimes gets a letter right."""
OPTIONS = {
    "max_steps": 4,
    "seed": 5,
    "trainer.ckpt.interval": 1,
    "orchestrator.batch_size": 32,
    "orchestrator.max_async_level": 0,
    "orchestrator.eval.interval": 50,
    "launch.threads": 1,
}
"""Without asynchrony a run is a function of its seed, its ranks and its servers."""


def write_run_file(path: Path, model: Path) -> Path:
    text = (EXAMPLE / "rl.toml").read_text()
    assert text.count('sft = "sft.toml"') == 1
    path.write_text(text.replace('sft = "sft.toml"', f'name = "{model}"'))
    return path


def arguments(file: Path, output: Path, **options: object) -> list[object]:
    """Return the arguments of `headrace` for a shortened run; an option's name has `__` for a dot."""
    given = {name.replace("__", "."): value for name, value in options.items()}
    merged = {**OPTIONS, **given, "output_dir": output}
    return ["rl", file, *(word for name, value in merged.items() for word in (f"--{name}", value))]


def headrace(*words: object, timeout: float = 240) -> str:
    """Run `headrace` on this machine to its end, and return its output."""
    command = [sys.executable, "-m", "headrace", *map(str, words)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def batch_digests(run: Path) -> dict[str, str]:
    """Return the digest of the bytes of each batch, from the journal."""
    with closing(sqlite3.connect(f"file:{RunDir(run).journal}?mode=ro", uri=True)) as journal:
        return dict(journal.execute("SELECT name, digest FROM files WHERE name LIKE 'batches/%' ORDER BY name"))
