"""Stand-ins for the commands of SLURM that record their calls: job 17 is accepted unless REFUSING names the command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SUBMIT = "sbatch --parsable --begin=now+1hour"
RECORDING = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
[ "$(basename "$0")" = "$REFUSING" ] && { echo "$REFUSING: error: invalid partition specified: gpu" >&2; exit 1; }
[ "$(basename "$0")" = sbatch ] && { cat > "$CALLS.script"; echo "17;cluster"; }
exit 0
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put them on the path and return the file of calls, one per line; `FILE.script` has what was submitted."""
    programs, calls = folder / "bin", folder / "calls"
    programs.mkdir()
    for name in ("sbatch", "scontrol", "scancel"):
        (programs / name).write_text(RECORDING)
        (programs / name).chmod(0o755)
    calls.touch()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("REFUSING", "")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return calls


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
