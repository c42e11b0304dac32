"""A real orchestrator process between the fake engine and a trainer that trains nothing, both in this process."""

from __future__ import annotations

import asyncio
import os
import string
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine

from headrace.environments.base import Context, Environment
from headrace.launch.saved_config import save
from headrace.rollout.types import Message, Rollout, Task
from headrace.rollout.version import Version
from headrace.runfile.reading import validate
from headrace.runfile.run import RunConfig
from headrace.transport.run_dir import RunDir

PROMPT_TOKENS = 100
TEMPLATE_TOKENS = 8
"""What the tiny model's chat template puts around one message."""
COMPLETION_TOKENS = 412
TOKENS = PROMPT_TOKENS + COMPLETION_TOKENS
FOREVER = 1_000_000
"""Steps that no benchmark reaches."""
TRAINER_POLL = 0.02


class OneTurn(Environment):
    """One prompt, one answer, and a reward that differs from answer to answer and costs nothing."""

    def tasks(self) -> list[dict[str, Any]]:
        letters = string.ascii_lowercase * (PROMPT_TOKENS // 26 + 1)
        return [{"prompt": f"{number:06d}{letters}"[: PROMPT_TOKENS - TEMPLATE_TOKENS]} for number in range(2000)]

    async def run(self, task: Task, context: Context) -> list[Rollout]:
        prompt: list[Message] = [{"role": "user", "content": task.data["prompt"]}]
        reply = await context.chat(prompt)
        reward = reply.text.count("a") / COMPLETION_TOKENS
        return [Rollout(rewards={"a": reward}, messages=[*prompt, reply.message], turns=[reply.turn])]


class OrchestratorProcess:
    """A running orchestrator, and what the system says about it (Linux)."""

    def __init__(self, run: RunDir, process: asyncio.subprocess.Process) -> None:
        self.run = run
        self._process = process

    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far."""
        self.check()
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_megabytes(self) -> float:
        self.check()
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def check(self) -> None:
        if self._process.returncode is not None:
            raise SystemExit(f"the orchestrator ended early:\n{_log(self.run).read_text()[-2000:]}")


@asynccontextmanager
async def running(engine: FakeEngine, model: Path, orchestrator: dict[str, Any]) -> AsyncIterator[OrchestratorProcess]:
    """Everything starts here, and ends with the block."""
    with tempfile.TemporaryDirectory() as root:
        run = RunDir(Path(root))
        save(run_config(run, model, orchestrator), run)
        server = await engine.listen(run.endpoints / "inference.json")
        process = await _start(run)
        trainer = asyncio.create_task(train_nothing(run))
        try:
            yield OrchestratorProcess(run, process)
        finally:
            trainer.cancel()
            if process.returncode is None:
                process.terminate()
            await process.wait()
            server.close()


def run_config(run: RunDir, model: Path, orchestrator: dict[str, Any]) -> RunConfig:
    """A trainer that needs no time passes versions by the second: nothing is too old, and many batches may be ahead."""
    settings = {
        "batch_size": 512,
        "group_size": 8,
        "max_async_level": 20,
        "max_off_policy_steps": FOREVER,
        "train": {"env": [{"id": "fake_run:OneTurn", "name": "one-turn"}]},
        **orchestrator,
    }
    tree = {
        "output_dir": str(run.root),
        "max_steps": FOREVER,
        "seq_len": TOKENS,
        "model": {"name": str(model)},
        "orchestrator": settings,
    }
    return validate(RunConfig, tree, "benchmark")[0]


async def train_nothing(run: RunDir) -> None:
    """Publish a version for each batch as soon as it appears."""
    step = 1
    while True:
        while not run.batches.exists(step):
            await asyncio.sleep(TRAINER_POLL)
        run.weights.publish(
            Version(0, step), lambda draft: (draft / "model.safetensors").write_bytes(b"weights") and None
        )
        run.weights.retire(keep_last=2)
        run.batches.delete_through(step)
        step += 1


async def _start(run: RunDir) -> asyncio.subprocess.Process:
    log = os.open(_log(run), os.O_CREAT | os.O_WRONLY)
    try:
        command = (sys.executable, "-m", "headrace", "orchestrator", str(run.root))
        return await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parent, stderr=log)
    finally:
        os.close(log)


def _log(run: RunDir) -> Path:
    return run.root / "orchestrator.log"
