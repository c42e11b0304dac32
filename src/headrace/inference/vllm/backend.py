"""The `Backend` over a vLLM server in a child process.

Requests are checked here before vLLM sees them. An update of the weights: the workers fetch the new version while
sampling continues; then vLLM is paused, loads it, clears its cache, is stamped with the version, and resumes. A failure
that could leave workers with different weights stops the engine: our server then restarts and loads the newest version.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path

from headrace.inference.backend import EngineError, EngineOverloaded, EngineState, EngineStopped, InvalidRequest
from headrace.inference.client.http import HttpClient
from headrace.inference.schema import SamplingParams
from headrace.inference.vllm import wire
from headrace.inference.vllm.control import Adapters, CallRefused, Control, Metrics, PreemptionCounter
from headrace.inference.vllm.generation import VllmGeneration
from headrace.inference.vllm.process import VllmProcess
from headrace.inference.weights.reading import READ_TIMEOUT_S, DirectoryReader, check_digest, read_checked_marker
from headrace.rollout.version import Version
from headrace.transport.adapter import is_adapter
from headrace.transport.lock import POLL_S, DeviceLock
from headrace.transport.weights import WeightsMarker
from headrace.transport.weights_link import is_linked

log = logging.getLogger(__name__)

INITIAL = Version(0, 0)
SPARE_REQUESTS = 256
"""Requests that are queued in vLLM in addition to the running ones; more are queued here."""
POLL_INTERVAL_S = 0.5
"""Between two reads of its metrics."""
SILENCE_TIMEOUT_S = 120.0
"""Without a response for so long, vLLM counts as dead."""
PROBE_PROMPTS = 8
"""Prompts that test whether logprobs are untruncated."""


class VllmBackend:
    """Create it in the event loop that will use it, then call `prepare`."""

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
        clear_cache: bool,
        adapters_directory: Path,
        max_lora_rank: int,
        decode: Callable[[list[int]], str],
        lock: DeviceLock | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._process, self._http = process, http
        self._control = Control(http, process.url)
        self._model_name, self._eos_token_ids, self._decode = model_name, eos_token_ids, decode
        self._capacity, self._replicas = max_running * replicas, replicas
        self._max_requests = self._capacity + max_waiting
        self._clear_cache = clear_cache
        self._reader = DirectoryReader(read_timeout_s)
        self._adapters = Adapters(self._control, adapters_directory, max_lora_rank, self._reader)
        self._stamps = self._untruncated = True
        self._version = INITIAL
        self._checksum = ""
        self._paused = False
        self._metrics = Metrics()
        self._preemptions = PreemptionCounter()
        self._in_flight: dict[str, VllmGeneration] = {}
        self._numbers = itertools.count()
        self._permits = asyncio.Semaphore(self._capacity + SPARE_REQUESTS)
        self._updating = asyncio.Lock()
        """Held while weights of the policy are read, which may take long; it is taken before `_changing`."""
        self._loading = asyncio.Lock()
        """Held while an adapter that requests name is read, or unloaded."""
        self._changing = asyncio.Lock()
        """Held while vLLM is paused or resumed."""
        self._settled = asyncio.Event()
        """Unset during an update, when it is open which version a new request would get."""
        self._settled.set()
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._lock = lock
        self._yields_device = False
        """Whether vLLM is paused for the trainer, or about to be."""
        self._hand_overs = 0
        self._tasks = [asyncio.create_task(self._watch_process()), asyncio.create_task(self._poll_metrics())]

    async def prepare(self) -> None:
        """Detect what this version of vLLM supports, and check that it samples."""
        self._stamps = await self._control.stamp(str(INITIAL))
        if not self._stamps:
            if self._replicas > 1:
                raise EngineError(
                    "this version of vLLM does not report which weights sampled a token: with "
                    "inference.vllm.data_parallel_size > 1 use a newer one, or several servers"
                )
            await self._control.on_workers("count_tokens")
        patched = await self._control.on_workers("report_untruncated_logprobs")
        self._untruncated = all(done == "True" for done in patched) and await self._reports_untruncated()
        if not self._untruncated:
            log.warning("unknown sampler in this version of vLLM: requests with top_p, top_k or min_p get no logprobs")
        if self._lock is not None:
            self._tasks.append(asyncio.create_task(self._follow_device_lock(self._lock)))

    async def _reports_untruncated(self) -> bool:
        """Whether the only token that truncation leaves has the logprob of the whole distribution."""
        one_token = partial(SamplingParams, temperature=wire.MAX_TEMPERATURE, max_tokens=1)
        free, alone = one_token(logprobs=1), [one_token(logprobs=0, top_k=1), one_token(logprobs=0, min_p=1.0)]
        likeliest: list[float] = []
        for token in range(0, self.vocab_size, -(-self.vocab_size // PROBE_PROMPTS)):
            [[(_, expected)]] = (await self.submit([token], free).result()).top_logprobs or []
            likeliest.append(expected)
            for params in alone:
                [reported] = (await self.submit([token], params).result()).logprobs
                if abs(reported - expected) > 0.05:
                    return False
        return min(likeliest) < -0.2  # a token that is certain anyway proves nothing

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
            fact = "this version of vLLM reports them only after top_p, top_k and min_p"
            fix = "Omit these or logprobs, or use another version."
            raise InvalidRequest(fact, key="logprobs", fix=fix)
        policy = self._adapters.names.get(None, self._model_name)
        model = policy if adapter is None else self._adapters.vllm_name(adapter)
        if len(self._in_flight) >= self._max_requests:
            raise EngineOverloaded(f"{self._max_requests} requests are running or waiting, which is the limit")
        name = f"{next(self._numbers)}x"
        headers = {}
        if session is not None and self._replicas > 1:
            headers["X-data-parallel-rank"] = str(zlib.crc32(session.encode()) % self._replicas)
        has_permit = False

        async def encode(stream: bool) -> bytes:
            nonlocal has_permit
            if not urgent:
                has_permit = await self._permits.acquire()
            await self._settled.wait()
            # A cache that survives an update must not be used by requests after it.
            salts = [] if self._clear_cache else [str(self._version)]
            if cache_salt is not None:
                salts.append(blake2b(cache_salt.encode(), digest_size=16).hexdigest())
            return wire.request_body(
                token_ids,
                params,
                request_id=name,
                max_tokens=min(params.max_tokens or self.max_model_len, self.max_model_len - len(token_ids)),
                eos_token_ids=self._eos_token_ids,
                model=model,
                cache_salt="-".join(salts) or None,
                urgent=urgent,
                stream=stream,
                logprobs=not params.truncates or self._untruncated,
            )

        def on_end() -> None:
            del self._in_flight[name]
            self._adapters.release(model)
            if has_permit:
                self._permits.release()

        self._adapters.hold(model)
        self._in_flight[name] = generation = VllmGeneration(
            http=self._http,
            url=self._process.url,
            headers=headers,
            token_ids=token_ids,
            params=params,
            encode=encode,
            on_end=on_end,
            dead=self._dead,
            decode=self._decode,
            marks=[(self._version, 0)],
            pinned=adapter is None and None in self._adapters.names,
        )
        return generation

    def state(self) -> EngineState:
        metrics = self._metrics
        running = min(metrics.running, len(self._in_flight))
        return EngineState(
            self._version,
            running,
            len(self._in_flight) - running,
            self._paused,
            self._capacity,
            metrics.kv_usage,
            metrics.tokens_sampled,
            metrics.tokens_computed,
            metrics.tokens_cached,
            self._preemptions.count,
            metrics.finished,
            sorted(name for name in self._adapters.names if name is not None),
            self._dead.result() if self._dead.done() else None,
            self._max_requests,
            self._yields_device,
            self._hand_overs,
        )

    async def pause(self) -> None:
        async with self._changing:
            await self._control.pause(clear_cache=False)
            self._paused = True

    async def resume(self) -> None:
        async with self._changing:
            self._paused = False
            await self._resume()

    async def _resume(self) -> None:
        """Resume vLLM unless it is paused by an admin or for the trainer."""
        if not (self._paused or self._yields_device):
            await self._control.resume()

    async def update_weights(self, directory: Path, version: Version) -> str:
        marker = await self._reader.read_async(directory, lambda: read_checked_marker(directory, version))
        # Shielded: a disconnecting caller must not leave the engine between two versions.
        return await asyncio.shield(asyncio.create_task(self._update(directory, version, marker)))

    async def _update(self, directory: Path, version: Version, marker: WeightsMarker) -> str:
        """Load a published version, unless it is loaded already, and return its checksum."""
        async with self._updating:
            if (version, marker.checksum) == (self._version, self._checksum):
                return marker.checksum
            if self._adapters.max_rank and is_adapter(directory) and not is_linked(directory):
                await self._reader.read_async(directory, lambda: check_digest(directory, marker.checksum))
                policy = await self._adapters.load(f"policy@{version}", directory)
                self._sample_with(version, marker.checksum, policy)
            else:
                await self._control.fetch_weights(directory, version, self._replicas, self._reader.timeout_s)
                async with self._changing:
                    await self._replace_weights(directory, version, marker.checksum)
            await self._adapters.unload_unused()
            return marker.checksum

    async def _replace_weights(self, directory: Path, version: Version, checksum: str) -> None:
        """Pause, load the fetched weights, resume. A failure in here cannot be undone."""
        self._settled.clear()
        try:
            await self._control.pause(clear_cache=self._clear_cache)
            if self._clear_cache:
                with suppress(CallRefused):  # then with the last metrics
                    await self._read_metrics()
                self._preemptions.expect(self._metrics.running, min(self._capacity, len(self._in_flight)))
            await self._load_weights(directory, version, checksum)
            await self._resume()
        except Exception as error:
            self._die(f"an update of the weights failed halfway, and vLLM may have weights of two versions: {error}")
            raise EngineStopped(self._dead.result()) from error
        finally:
            self._settled.set()

    async def _load_weights(self, directory: Path, version: Version, checksum: str) -> None:
        """Load the version while vLLM is paused."""
        counts = [] if self._stamps else await self._control.on_workers("sampled_tokens")
        loaded = set(await self._control.on_workers("load_published", str(directory), str(version)))
        if loaded != {checksum}:
            raise EngineError(f"its workers loaded {sorted(loaded)}, not {checksum}")
        if self._stamps:
            await self._control.stamp(str(version))
        else:  # record each request's number of tokens
            sampled = {_own_name(name): count for name, count in counts[0]["counts"].items()}
            ended = {_own_name(name) for name in counts[0]["ended"]}
            for name, generation in self._in_flight.items():
                if name in sampled or name not in ended:
                    generation.marks.append((version, sampled.get(name, 0)))
        self._sample_with(version, checksum, None)
        for generation in [generation for generation in self._in_flight.values() if generation.pinned]:
            generation.fail(EngineError("the base model of the request's adapter was replaced"))

    def _sample_with(self, version: Version, checksum: str, policy: str | None) -> None:
        """Set everything that new requests depend on, without an await in between."""
        self._version, self._checksum = version, checksum
        self._adapters.use(None, policy)

    async def _read_metrics(self) -> None:
        """Read vLLM's metrics; in a pause they are those before its cache was cleared."""
        self._metrics = await self._control.metrics()
        self._preemptions.update(self._metrics.preemptions)

    async def load_adapter(self, name: str, directory: Path) -> None:
        async with self._loading:
            self._adapters.use(name, await self._adapters.load(name, directory))
            await self._adapters.unload_unused()

    async def unload_adapter(self, name: str) -> None:
        async with self._loading:
            self._adapters.vllm_name(name)  # raises if there is none
            self._adapters.use(name, None)
            await self._adapters.unload_unused()

    async def failure(self) -> str:
        return await asyncio.shield(self._dead)

    async def close(self) -> None:
        self._die("the server is shutting down")
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        await self._process.stop()
        if self._lock is not None:
            self._lock.close()
        await self._http.close()

    def _die(self, reason: str) -> None:
        """Record why vLLM is dead, and end all requests."""
        if not self._dead.done():
            self._dead.set_result(reason)
        for generation in list(self._in_flight.values()):
            generation.fail(EngineStopped(self._dead.result()))

    async def _watch_process(self) -> None:
        self._die(await self._process.ended())

    async def _follow_device_lock(self, lock: DeviceLock) -> None:
        """Pause vLLM while the trainer holds the device lock; stop the engine if that fails.

        vLLM keeps its memory and its requests: without their KV cache it could not continue them by itself.
        """
        try:
            while True:
                if lock.is_held and lock.is_requested_by_trainer:
                    async with self._changing:
                        self._yields_device = True
                        await self._control.pause(clear_cache=False)
                    self._hand_overs += 1
                    lock.release()
                elif not lock.is_held and lock.try_acquire():
                    async with self._changing:
                        self._yields_device = False
                        await self._resume()
                await asyncio.sleep(POLL_S)
        except Exception as error:  # the trainer would wait for the lock forever
            self._die(f"vLLM cannot be paused for the trainer: {error}")

    async def _poll_metrics(self) -> None:
        """Read the metrics and unload unused adapters, periodically; declare vLLM dead after a long silence."""
        loop = asyncio.get_running_loop()
        responded = loop.time()
        while not self._dead.done():
            try:
                await self._read_metrics()
                responded = loop.time()
                await self._adapters.unload_unused()
            except (CallRefused, EngineStopped) as error:
                if loop.time() - responded > SILENCE_TIMEOUT_S:
                    self._die(
                        f"vLLM has not responded for {SILENCE_TIMEOUT_S:g} s: {error}. {self._process.log_tail()}"
                    )
            await asyncio.sleep(POLL_INTERVAL_S)


def _own_name(name: str) -> str:
    """Return our request id from vLLM's, which has a prefix and a suffix."""
    return name.removeprefix(wire.ID_PREFIX).partition("-")[0]
