"""What stands at the other ends of the orchestrator in its tests: an engine on a real socket, a trainer on real files.

The engine needs no torch: it answers reverse-text prompts correctly with a probability that grows with the version.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from headrace.inference.schema import (
    ChoiceLogprobs,
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    Health,
    PromptLogprob,
    TokenLogprob,
    UpdateWeightsRequest,
    UpdateWeightsResponse,
    WeightVersionSpan,
)
from headrace.rollout.batch import Batch
from headrace.rollout.version import Version
from headrace.text.tokenizer import Tokenizer
from headrace.transport.endpoint import Endpoint, write_endpoint
from headrace.transport.run_dir import RunDir
from headrace.transport.weights import read_marker


class StandInEngine:
    """Serves what the orchestrator needs of an engine, with `delay` seconds per answer."""

    def __init__(self, model: Path, run: RunDir, delay: float = 0.0, seed: int = 0, name: str = "inference") -> None:
        self.name = name
        self.tokenizer = Tokenizer(model)
        self.run = run
        self.delay = delay
        self.rng = random.Random(seed)
        self.version = Version(0, 0)
        self.answered = 0
        self.broken = False
        self.score_token: Callable[[Version, int, float], float] = lambda version, token, temperature: -0.5
        """The logprob of a token, by version and temperature, where a sequence is to be scored."""

    async def __aenter__(self) -> StandInEngine:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def listen(self) -> None:
        """On a new port each time."""
        application = web.Application()
        application.router.add_get("/health", self.health)
        application.router.add_post("/inference/v1/generate", self.generate)
        application.router.add_post("/update_weights", self.update_weights)
        self.runner = web.AppRunner(application, shutdown_timeout=0.05)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        port = self.runner.addresses[0][1]
        write_endpoint(self.run.endpoints / f"{self.name}.json", Endpoint(f"http://127.0.0.1:{port}", pid=1))

    async def die(self) -> None:
        """Every connection breaks; an engine that comes back has the initial model."""
        await self.runner.cleanup()
        self.version = Version(0, 0)

    async def health(self, _: web.Request) -> web.Response:
        return _json(Health("ok", str(self.version), "stand-in", 0, 0, False, 16, 256, 320))

    async def update_weights(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=UpdateWeightsRequest)
        marker = read_marker(Path(body.path))
        self.version = marker.version
        return _json(UpdateWeightsResponse(marker.incarnation, marker.step, marker.checksum))

    async def generate(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=GenerateRequest)
        if self.broken:
            return web.json_response({"error": {"message": "out of order", "type": "internal"}}, status=500)
        version = self.version
        await asyncio.sleep(self.delay)
        if body.sampling_params.prompt_logprobs is not None:
            return self.score(body, version)
        self.answered += 1
        word = self.tokenizer.decode(body.token_ids).split("user\n")[1].split("<|im_end|>")[0]
        right = self.rng.random() < 0.3 + 0.05 * version.step
        ids = [*self.tokenizer.encode(word[::-1] if right else word), self.tokenizer.eos_token_id]
        content = [TokenLogprob(token, -0.5, f"token_id:{token}") for token in ids]
        spans = [WeightVersionSpan(str(version), 0, len(ids))]
        choice = GenerateChoice(0, ids, "stop", ChoiceLogprobs(content), spans)
        return _json(GenerateResponse("r", [choice]))

    def score(self, body: GenerateRequest, version: Version) -> web.Response:
        temperature = body.sampling_params.temperature
        known = [{t: PromptLogprob(self.score_token(version, t, temperature))} for t in body.token_ids[1:]]
        choice = GenerateChoice(0, [0], "length", weight_versions=[WeightVersionSpan(str(version), 0, 1)])
        return _json(GenerateResponse("r", [choice], prompt_logprobs=[None, *known]))


class StandInTrainer:
    """Takes batches as they appear and publishes a version for each, without training anything."""

    def __init__(self, run: RunDir, seconds_per_step: float = 0.0) -> None:
        self.run = run
        self.seconds_per_step = seconds_per_step
        self.batches: list[Batch] = []
        self.incarnation = 0

    async def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            while not self.run.batches.exists(step):
                await asyncio.sleep(0.005)
            self.batches.append(self.run.batches.read(step))
            await asyncio.sleep(self.seconds_per_step)
            self.publish(step)

    def publish(self, step: int) -> None:
        content = f"weights {self.incarnation}-{step}".encode()
        self.run.weights.publish(
            Version(self.incarnation, step), lambda draft: (draft / "model.safetensors").write_bytes(content) and None
        )


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
