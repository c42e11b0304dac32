"""`headrace rl` on a workload, with either engine, as a contender. What it reports is read from its run directory.

The run begins when the orchestrator has found the engine and draws its first prompt.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.request
from pathlib import Path

from benchmarks.end_to_end.settings import UNKNOWN, Point, Settings, workload_of

from headrace.observe.metrics import read_metrics
from headrace.transport.endpoint import read_endpoints
from headrace.transport.run_dir import RunDir

VLLM_PYTHON = "HEADRACE_VLLM_PYTHON"
VLLM_ARGUMENTS = ["--attention-config", json.dumps({"backend": "FLASH_ATTN", "flash_attn_version": 3})]

TRAINING = ("time/wait_for_turn", "time/forward_backward", "time/probe", "time/publish")
"""What the trainer does while the engine waits for it."""


def command(settings: Settings, how: str, place: Path) -> list[str]:
    """`how` is the engine and how it shares the GPU with the trainer."""
    engine, sharing, *async_level = how.split()
    workload = workload_of(settings.workload)
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
        "orchestrator.train.env.0.id": workload.environment,
        "orchestrator.eval": "null",
        "inference.engine": engine,
        "launch.sharing": sharing,
    }
    if engine == "vllm":
        overrides["inference.vllm.python"] = os.environ[VLLM_PYTHON]
        overrides["inference.vllm.args"] = json.dumps(VLLM_ARGUMENTS)
    if async_level:
        overrides["orchestrator.max_async_level"] = async_level[0]
    overrides |= dict(override.split("=", 1) for override in settings.headrace)
    words = [word for key, value in overrides.items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "headrace", "rl", str(workload.run_file), *words, "--clean"]


def read(place: Path) -> tuple[float | None, list[Point]]:
    """Return when the run began, by the clock, if it has, and its steps so far."""
    records = read_metrics(place / "metrics.jsonl")
    shipped = [record for record in records if "reward/all/mean" in record]
    if not shipped:
        return None, []
    began = shipped[0]["time"] - shipped[0]["progress/seconds"]
    trained = {record["step"]: record for record in records if "time/forward_backward" in record}
    return began, [
        Point(
            record["step"],
            record["time"] - began,
            record["reward/all/mean"],
            record["metrics/all/exact"],
            record["decode_len/all/mean"],
            sum(trained[record["step"]].get(name, 0.0) for name in TRAINING) if record["step"] in trained else UNKNOWN,
        )
        for record in shipped
    ]


def read_engine_counters(place: Path) -> dict[str, float] | None:
    """Return the engine's counters with the time as `at`; None while no engine answers."""
    try:
        endpoints = list(read_endpoints(RunDir(place).endpoints).values())
        if not endpoints:
            return None
        request = urllib.request.Request(
            f"{endpoints[0].url}/metrics", headers={"Authorization": f"Bearer {endpoints[0].api_key}"}
        )
        with urllib.request.urlopen(request, timeout=5) as response:
            page = response.read().decode()
    except OSError:  # the server starts or ends
        return None
    counters = re.findall(r"^headrace_(\w+) ([\d.e+-]+)$", page, re.MULTILINE)
    return {"at": time.time(), **{name: float(value) for name, value in counters}}
