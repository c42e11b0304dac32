"""`headrace rl` on the example, with either engine, as a contender. What it reports is read from its run directory.

The run begins when the orchestrator has found the engine and draws its first prompt.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.end_to_end.settings import EXAMPLE, Point, Settings

from headrace.observe.metrics import read_metrics

VLLM_PYTHON = "HEADRACE_VLLM_PYTHON"
VLLM_ARGUMENTS = ["--attention-config", json.dumps({"backend": "FLASH_ATTN", "flash_attn_version": 3})]


def command(settings: Settings, how: str, place: Path) -> list[str]:
    """`how` is the engine and how it shares the GPU with the trainer."""
    engine, sharing = how.split()
    overrides: dict[str, object] = {
        "output_dir": place,
        "model.name": settings.model,
        "seed": settings.seed,
        "max_steps": settings.steps,
        "trainer.optim.lr": settings.lr,
        "trainer.loss.type": "ppo_clip",
        "orchestrator.batch_size": settings.rollouts,
        "orchestrator.group_size": settings.group,
        "orchestrator.train.sampling.max_tokens": settings.max_tokens,
        "orchestrator.train.sampling.temperature": settings.temperature,
        "orchestrator.eval": "null",
        "inference.engine": engine,
        "launch.sharing": sharing,
    }
    if engine == "vllm":
        overrides["inference.vllm.python"] = os.environ[VLLM_PYTHON]
        overrides["inference.vllm.args"] = json.dumps(VLLM_ARGUMENTS)
    words = [word for key, value in overrides.items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "headrace", "rl", str(EXAMPLE / "rl.toml"), *words, "--clean"]


def read(place: Path) -> tuple[float | None, list[Point]]:
    """When it began, by the clock, if it has, and its steps so far."""
    records = [record for record in read_metrics(place / "metrics.jsonl") if "reward/all/mean" in record]
    if not records:
        return None, []
    began = records[0]["time"] - records[0]["progress/seconds"]
    return began, [
        Point(record["step"], record["time"] - began, record["reward/all/mean"], record["metrics/all/exact"])
        for record in records
    ]
