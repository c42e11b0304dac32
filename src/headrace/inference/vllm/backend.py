"""vLLM as the server knows it: a child process behind the contract of `inference/backend.py`.

Requests are checked here first: vLLM sees nothing that could harm it. New weights are fetched by its workers beside the
sampling; then the engine is paused, takes them, forgets its cache, is told the version, and goes on. What could leave
its workers with different weights ends it: the server that stands in front is then started anew, and catches up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import zlib
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from headrace.inference.backend import (
    EngineError,
    EngineOverloaded,
    EngineState,
    EngineStopped,
    InvalidRequest,
    ModelNotFound,
)
from headrace.inference.client.http import HttpClient
from headrace.inference.schema import SamplingParams
from headrace.inference.vllm import wire
from headrace.inference.vllm.adapters import Adapters
from headrace.inference.vllm.control import Control, Refusal
from headrace.inference.vllm.device_lock import VllmDeviceLock
from headrace.inference.vllm.fetching import fetch_everywhere
from headrace.inference.vllm.generation import VllmGeneration
from headrace.inference.vllm.metrics import Metrics, Preemptions
from headrace.inference.vllm.process import VllmProcess
from headrace.inference.weights.errors import WeightsError, read_checked_marker
from headrace.rollout.version import Version
from headrace.transport.adapter import is_adapter
from headrace.transport.device_lock import DeviceLock
from headrace.transport.weights import WeightsMarker
from headrace.transport.weights_link import is_linked

log = logging.getLogger(__name__)

INITIAL = Version(0, 0)
SPARE = 256
"""Requests that wait inside vLLM beside those that run, so that it never waits for us; more wait here."""
GLANCES = 0.5
"""Seconds between two looks at its metrics."""
SILENCE = 120.0
"""Seconds without an answer after which it counts as dead."""
TRIED = 8
"""Prompts that show whether logprobs are what they should be."""


class VllmBackend:
    """A `Backend` over a child process. Must be made inside the event loop that will use it, then `prepare`d."""

    name = "vllm"

    def __init__(
        self,
        process: VllmProcess,
        http: HttpClient,
        *,
        model_name: str,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_model_len: int,
        max_running: int,
        max_waiting: int,
        replicas: int,
        forget: bool,
        adapters: Adapters | None,
        decode: Callable[[list[int]], str],
        lock: DeviceLock | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._process, self._http = process, http
        self._control = Control(http, process.url)
        self._model_name, self._eos_token_ids, self._decode = model_name, eos_token_ids, decode
        self._capacity, self._replicas = max_running * replicas, replicas
        self._most = self._capacity + max_waiting
        self._forget = forget
        self._adapters = adapters
        self._stamps = self._untruncated = True
        self._version = INITIAL
        self._checksum = ""
        self._paused = False
        self._metrics = Metrics()
        self._preemptions = Preemptions()
        self._in_flight: dict[str, VllmGeneration] = {}
        self._numbers = itertools.count()
        self._turns = asyncio.Semaphore(self._capacity + SPARE)
        self._changing = asyncio.Lock()
        self._settled = asyncio.Event()
        """Not between two versions: what is sent to vLLM then could belong to either."""
        self._settled.set()
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._device_lock = VllmDeviceLock(lock)
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._glance())]

    async def prepare(self) -> None:
        """Find out what this vLLM can do, and that it samples at all."""
        self._stamps = await self._control.stamp(str(INITIAL))
        if not self._stamps:
            if self._replicas > 1:
                raise EngineError(
                    "this vLLM does not tell which weights sampled what: with inference.vllm.data_parallel_size > 1 "
                    "use a newer one, or several servers"
                )
            await self._control.on_workers("count_tokens")
        if all(found == "True" for found in await self._control.on_workers("report_untruncated_logprobs")):
            self._untruncated = await self._reports_untruncated()
        else:
            self._untruncated = False
        if not self._untruncated:
            log.warning("this vLLM's sampler is unknown: requests with top_p, top_k or min_p get no logprobs")
        self._tasks.append(asyncio.create_task(self._follow_device_lock()))

    async def _reports_untruncated(self) -> bool:
        """Whether a token that was the only one left to choose has the logprob that it has among all."""
        free = SamplingParams(temperature=wire.MAX_TEMPERATURE, max_tokens=1, logprobs=1)
        alone = [
            SamplingParams(temperature=wire.MAX_TEMPERATURE, max_tokens=1, logprobs=0, top_k=1),
            SamplingParams(temperature=wire.MAX_TEMPERATURE, max_tokens=1, logprobs=0, min_p=1.0),
        ]
        likeliest: list[float] = []
        for token in range(0, self.vocab_size, -(-self.vocab_size // TRIED)):
            [[(_, expected)]] = (await self.submit([token], free).result()).top_logprobs or []
            likeliest.append(expected)
            for params in alone:
                [reported] = (await self.submit([token], params).result()).logprobs
                if abs(reported - expected) > 0.05:
                    return False
        return min(likeliest) < -0.2  # a token that is certain anyway shows nothing

    def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        urgent: bool = False,
        adapter: str | None = None,
        session: str | None = None,
    ) -> VllmGeneration:
        if self._dead.done():
            raise EngineStopped(self._dead.result())
        wire.check(token_ids, params, self.vocab_size, self.max_model_len)
        if params.truncates and params.logprobs is not None and not self._untruncated:
            raise InvalidRequest(
                "logprobs: this vLLM reports them among what top_p, top_k and min_p leave alone: "
                "leave these or logprobs out, or use another version of vLLM"
            )
        model, pinned = self._model_for(adapter)
        if len(self._in_flight) >= self._most:
            raise EngineOverloaded(f"{self._most} requests are running or waiting, which is as many as may")
        name = f"{next(self._numbers)}x"

        def body(stream: bool) -> bytes:
            return wire.request_body(
                token_ids,
                params,
                request_id=name,
                max_tokens=min(params.max_tokens or self.max_model_len, self.max_model_len - len(token_ids)),
                eos_token_ids=self._eos_token_ids,
                model=model,
                cache_salt=self._salt(cache_salt),
                urgent=urgent,
                stream=stream,
                logprobs=not params.truncates or self._untruncated,
            )

        held = False

        async def begin() -> None:
            nonlocal held
            if not urgent:
                held = await self._turns.acquire()
            await self._settled.wait()

        def over() -> None:
            del self._in_flight[name]
            if self._adapters is not None:
                self._adapters.release(model)
            if held:
                self._turns.release()

        if self._adapters is not None:
            self._adapters.hold(model)
        self._in_flight[name] = generation = VllmGeneration(
            self._http,
            self._process.url,
            token_ids=token_ids,
            params=params,
            body=body,
            headers=self._headers(session),
            begin=begin,
            over=over,
            dead=self._dead,
            decode=self._decode,
            version=self._version,
            pinned=pinned,
        )
        return generation

    def _model_for(self, adapter: str | None) -> tuple[str, bool]:
        """What vLLM calls the model to ask, and whether it stays what it is when new weights arrive."""
        policy = None if self._adapters is None else self._adapters.policy
        if adapter is None:
            return (self._model_name, False) if policy is None else (policy, True)
        if self._adapters is None or adapter not in self._adapters.names:
            raise ModelNotFound(f"no adapter {adapter!r} is loaded")
        return self._adapters.names[adapter], False

    def _salt(self, salt: str | None) -> str | None:
        """Where a cache outlives its weights, nobody who comes later may find it."""
        parts = [] if self._forget else [str(self._version)]
        if salt is not None:
            parts.append(blake2b(salt.encode(), digest_size=16).hexdigest())
        return "-".join(parts) or None

    def _headers(self, session: str | None) -> dict[str, str]:
        if session is None or self._replicas == 1:
            return {}
        return {"X-data-parallel-rank": str(zlib.crc32(session.encode()) % self._replicas)}

    def state(self) -> EngineState:
        found = self._metrics
        running = min(found.running, len(self._in_flight))
        return EngineState(
            self._version,
            running,
            len(self._in_flight) - running,
            self._paused,
            self._capacity,
            found.kv_usage,
            found.tokens_sampled,
            found.tokens_computed,
            found.tokens_cached,
            self._preemptions.count,
            found.finished,
            [] if self._adapters is None else sorted(self._adapters.names),
            self._dead.result() if self._dead.done() else None,
            self._most,
            self._device_lock.is_held_by_trainer,
            self._device_lock.hand_overs,
        )

    async def pause(self) -> None:
        async with self._changing:
            await self._control.pause(forget=False)
            self._paused = True

    async def resume(self) -> None:
        async with self._changing:
            self._paused = False
            await self._go_on()

    async def _go_on(self) -> None:
        """Unless somebody wants it to stand still."""
        if not (self._paused or self._device_lock.is_held_by_trainer):
            await self._control.resume()

    async def update_weights(self, directory: Path, version: Version) -> str:
        marker = await asyncio.to_thread(read_checked_marker, directory, version)
        # Shielded: a caller that hangs up must not leave the engine between two versions.
        return await asyncio.shield(asyncio.create_task(self._update(directory, version, marker)))

    async def _update(self, directory: Path, version: Version, marker: WeightsMarker) -> str:
        async with self._changing:
            if (version, marker.checksum) == (self._version, self._checksum):
                return marker.checksum
            if self._adapters is not None and is_adapter(directory) and not is_linked(directory):
                policy = await self._adapters.load_policy(self._control, directory, version, marker.checksum)
                self._sample_with(version, marker.checksum, policy)
            else:
                await fetch_everywhere(self._control, directory, version, self._replicas)
                await self._replace(directory, version, marker.checksum)
            if self._adapters is not None:
                await self._adapters.sweep(self._control)
            return marker.checksum

    async def _replace(self, directory: Path, version: Version, checksum: str) -> None:
        """Pause, load what was fetched, go on. What goes wrong here cannot be taken back."""
        self._settled.clear()
        try:
            await self._control.pause(forget=self._forget)
            if self._forget:
                with suppress(Refusal):  # then with what it said last
                    await self._look()
                self._preemptions.expect(self._metrics.running, min(self._capacity, len(self._in_flight)))
            await self._switch(directory, version, checksum)
            await self._go_on()
        except Exception as error:
            self._die(f"an update failed halfway, and vLLM may be left with weights of two versions: {error}")
            raise EngineStopped(self._dead.result()) from error
        finally:
            self._settled.set()

    async def _switch(self, directory: Path, version: Version, checksum: str) -> None:
        """While all stands still: from here on this version samples."""
        told = [] if self._stamps else await self._control.on_workers("sampled_tokens")
        found = await self._control.on_workers("load_published", str(directory), str(version))
        if set(found) != {checksum}:
            raise EngineError(f"its workers loaded {sorted(set(found))}, not {checksum}")
        if self._stamps:
            await self._control.stamp(str(version))
        else:
            self._mark(version, told[0])
        self._sample_with(version, checksum, None)
        for generation in [generation for generation in self._in_flight.values() if generation.pinned]:
            generation.fail(EngineError("the model under the adapter that it was sampled with was replaced"))

    def _sample_with(self, version: Version, checksum: str, policy: str | None) -> None:
        """All that a new request is told by, at once: nothing may be awaited in between."""
        self._version, self._checksum = version, checksum
        if self._adapters is not None:
            self._adapters.use_policy(policy)

    def _mark(self, version: Version, worker: dict[str, Any]) -> None:
        """Note how many tokens each request has, for a vLLM that does not tell which weights sampled what."""
        counts = {_own_name(name): count for name, count in worker["counts"].items()}
        ended = {_own_name(name) for name in worker["ended"]}
        for name, generation in self._in_flight.items():
            if name in counts or name not in ended:
                generation.marks.append((version, counts.get(name, 0)))

    async def _look(self) -> None:
        """Take in what it says of itself; in a pause, what was so before its cache was emptied."""
        self._metrics = await self._control.metrics()
        self._preemptions.follow(self._metrics.preemptions)

    async def load_adapter(self, name: str, directory: Path) -> None:
        if self._adapters is None:
            raise WeightsError("vLLM was started without adapters: set inference.vllm.max_lora_rank")
        async with self._changing:
            await self._adapters.load(self._control, name, directory)

    async def unload_adapter(self, name: str) -> None:
        async with self._changing:
            if self._adapters is None or name not in self._adapters.names:
                raise ModelNotFound(f"no adapter {name!r} is loaded")
            await self._adapters.unload(self._control, name)

    async def failure(self) -> str:
        return await asyncio.shield(self._dead)

    async def close(self) -> None:
        self._die("the server is shutting down")
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        await self._process.stop()
        self._device_lock.close()
        await self._http.close()

    def _die(self, reason: str) -> None:
        if not self._dead.done():
            self._dead.set_result(reason)
        for generation in list(self._in_flight.values()):
            generation.fail(EngineStopped(self._dead.result()))

    async def _watch(self) -> None:
        self._die(await self._process.ended())

    async def _follow_device_lock(self) -> None:
        """One that does not stand still when it must would leave the trainer waiting for ever: that is its end."""
        try:
            await self._device_lock.follow(self._control, self._changing, self._go_on)
        except Exception as error:  # whatever it is, nobody would give way from here on
            self._die(f"vLLM cannot be paused for the trainer: {error}")

    async def _glance(self) -> None:
        """Keep the metrics fresh, and unload what is no longer needed; one that is silent for long is dead."""
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while not self._dead.done():
            try:
                await self._look()
                answered = loop.time()
                if self._adapters is not None:
                    await self._adapters.sweep(self._control)
            except (Refusal, EngineStopped) as error:
                if loop.time() - answered > SILENCE:
                    self._die(f"vLLM has not answered for {SILENCE:g} s: {error}. {self._process.last_words()}")
            await asyncio.sleep(GLANCES)


def _own_name(name: str) -> str:
    """Ours of a request, out of vLLM's, which adds something before and after."""
    return name.removeprefix(wire.ID_PREFIX).partition("-")[0]
