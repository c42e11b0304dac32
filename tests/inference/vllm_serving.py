"""The stand-in for vLLM as a child process, a backend over it, and what there is to ask and publish."""

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.inference.client.http import HttpClient
from headrace.inference.schema import SamplingParams
from headrace.inference.vllm.backend import VllmBackend
from headrace.inference.vllm.process import ChildDirectory, VllmProcess
from headrace.inference.weights.reading import READ_TIMEOUT_S
from headrace.rollout.version import Version
from headrace.transport.lock import DeviceLock
from headrace.transport.weights import WeightStore

STAND_IN = Path(__file__).parent / "vllm_stand_in"
LONG = SamplingParams(max_tokens=100, logprobs=0, ignore_eos=True)


@asynccontextmanager
async def stand_in(requests: Path, **variables: str) -> AsyncIterator[VllmProcess]:
    room = ChildDirectory()
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(room.import_path), str(STAND_IN)]),
        "PYTHONUNBUFFERED": "1",
        "REQUESTS": str(requests),
        **variables,
    }
    process = await VllmProcess.start(room, Path(sys.executable), ["--uds", str(room.socket)], env)
    try:
        yield process
    finally:
        await process.stop()
    assert not room.directory.exists()


class Served:
    """A backend, and what was asked of the stand-in behind it."""

    def __init__(self, backend: VllmBackend, process: VllmProcess, requests: Path) -> None:
        self.backend, self.process, self._requests = backend, process, requests

    def asked(self, route: str) -> list[dict[str, Any]]:
        return [asked for asked in self._all() if asked["route"] == route]

    def routes(self) -> list[str]:
        return [asked["route"] for asked in self._all()]

    def _all(self) -> list[dict[str, Any]]:
        lines = self._requests.read_text().splitlines() if self._requests.exists() else []
        return [json.loads(line) for line in lines]


@asynccontextmanager
async def serving(
    directory: Path,
    *,
    replicas: int = 1,
    clear_cache: bool = True,
    adapters: bool = False,
    lock: DeviceLock | None = None,
    read_timeout_s: float = READ_TIMEOUT_S,
    **variables: str,
) -> AsyncIterator[Served]:
    async with stand_in(directory / "requests", **variables) as process:
        http = HttpClient()
        await process.ready(http, 30)
        backend = VllmBackend(
            process,
            http,
            model_name="policy",
            vocab_size=1000,
            eos_token_ids=frozenset({15}),
            max_model_len=200,
            max_running=2,
            max_waiting=4,
            replicas=replicas,
            clear_cache=clear_cache,
            adapters_directory=directory / "copies",
            max_lora_rank=8 if adapters else 0,
            decode=lambda tokens: " ".join(map(str, tokens)),
            lock=lock,
            read_timeout_s=read_timeout_s,
        )
        try:
            await backend.prepare()
            os.truncate(directory / "requests", 0)
            yield Served(backend, process, directory / "requests")
        finally:
            await backend.close()


def publish(directory: Path, version: Version) -> Path:
    store = WeightStore(directory / "weights")
    store.publish(version, lambda draft: (draft / "model.safetensors").write_bytes(b"weights") and None)
    return store.path(version)


async def tokens_of(generation: Any, count: int) -> None:
    seen = 0
    async for piece in generation.chunks():
        seen += len(piece.token_ids)
        if seen >= count:
            return
