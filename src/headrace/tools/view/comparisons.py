"""Runs over each other: what `headrace compare` finds, with the curves of its metric.

The comparison reads all records of the runs, so it runs in a process of its own: its memory is freed with it.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec

from headrace.errors import BadInput
from headrace.tools.compare.inputs import differences
from headrace.tools.view.runs import RunFolder
from headrace.tools.view.series import downsample

MAX_COMPARED = 20
TIMEOUT_S = 120.0
BUCKETS = 600


def compare(folder: RunFolder, ids: list[str], metric: str) -> dict[str, Any]:
    if not 2 <= len(ids) <= MAX_COMPARED:
        raise BadInput(f"choose 2 to {MAX_COMPARED} runs", key="run", value=len(ids))
    runs = [folder.run(id) for id in ids]
    command = [sys.executable, "-m", "headrace", "compare", "--json", *(str(run.dir.root) for run in runs)]
    command += [f"--metric={metric}"] if metric else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise BadInput(done.stderr.strip().removeprefix("headrace: "))
    comparison = msgspec.json.decode(done.stdout)
    variants = {report["path"]: report["variant"] for report in comparison["runs"]}
    shown = comparison["metric"]
    curves: dict[str, list[Any]] = {}
    for run in runs:
        variant, points = variants.get(str(run.dir.root)), run.metrics.points([shown])[shown]
        if variant is not None and len(points[0]):
            series = downsample(*points, BUCKETS)
            curves.setdefault(variant, []).append({"step": series["step"], "value": series["mean"], "run": run.id})
    differing = differences([run.compared_settings() for run in runs])
    return {
        "comparison": comparison,
        "curves": {shown: curves},
        "settings": {
            "keys": list(differing),
            "values": {run.id: [values[n] for values in differing.values()] for n, run in enumerate(runs)},
        },
        "names": sorted(set.intersection(*(set(run.metrics.names()) for run in runs))),
    }
