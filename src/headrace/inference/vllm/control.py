"""vLLM's admin routes as typed calls: pause, worker calls, version stamps, weights, metrics; and its LoRA adapters.

Adapters are those that requests name, and the policy's, one per version. vLLM's caches depend on an adapter's name, so
every load gets a new name, and requests in flight keep the adapter and the version that they started with. A replaced
adapter is unloaded once no request uses it. The files are copied first: vLLM may read them again later, after the
trainer has removed them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec

from headrace.inference.backend import EngineError, EngineStopped, ModelNotFound
from headrace.inference.client.errors import server_message
from headrace.inference.client.http import HttpClient, HttpResponse, ServerUnreachable
from headrace.inference.weights.reading import DirectoryReader, WeightsError, WeightsUnreachable
from headrace.rollout.version import Version
from headrace.transport.adapter import CONFIG, TENSORS, AdapterError, read_config
from headrace.transport.files import require_regular

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 600.0
"""For a call, such as loading a large model."""
METRICS_TIMEOUT_S = 10.0
MIN_FETCH_POLL_S, MAX_FETCH_POLL_S = 0.02, 0.5
"""Delay between two checks whether the workers have fetched a version, the first and the longest."""
_METRIC = re.compile(r"vllm:(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)")
_REASON = re.compile(r'finished_reason="(\w+)"')


class CallRefused(EngineError):
    """vLLM responded with an error; the message is vLLM's."""


class _NoSuchRoute(CallRefused):
    """This version of vLLM does not have the route."""


class _Results(msgspec.Struct):
    results: list[Any] = []


class Metrics(msgspec.Struct):
    """The metrics that an engine's state needs, summed over all replicas.

    `preemptions` includes requests that an update of the weights preempted: see `PreemptionCounter`.
    """

    running: int = 0
    kv_usage: float = 0.0
    tokens_sampled: int = 0
    tokens_computed: int = 0
    tokens_cached: int = 0
    preemptions: int = 0
    finished: dict[str, int] = {}


class Control:
    """Admin calls to one vLLM server. Every call raises `CallRefused`, or `EngineStopped` if vLLM is unreachable."""

    def __init__(self, http: HttpClient, url: str) -> None:
        self.http = http
        self.url = url

    async def pause(self, *, clear_cache: bool) -> None:
        """Suspend all requests. With `clear_cache`, their KV cache is recomputed later."""
        await self._post(f"/pause?mode=keep&clear_cache={'true' if clear_cache else 'false'}")

    async def resume(self) -> None:
        await self._post("/resume")

    async def on_workers(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of our worker extension on all workers, between two steps.

        Returns the results of the first replica; a failure of any replica is raised.
        """
        response = await self._post("/collective_rpc", {"method": method, "args": arguments})
        try:
            return msgspec.json.decode(response.content, type=_Results).results if response.content else []
        except msgspec.DecodeError as error:
            raise CallRefused(f"vLLM's response to {method} is invalid: {error}") from error

    async def fetch_weights(self, directory: Path, version: Version, replicas: int, timeout_s: float) -> None:
        """Have every worker fetch a published version while sampling continues, within `timeout_s`.

        Raises `WeightsError`; the weights in use are unchanged in any case.
        """
        arguments = (str(directory), str(version))
        await self.on_workers("fetch_published", *arguments)
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_fetched(arguments)
        except TimeoutError as error:
            raise WeightsUnreachable(
                f"{directory}: vLLM's workers did not read it within {timeout_s:g} s (inference.http.admin_timeout)"
            ) from error
        if replicas == 1:
            return
        try:
            await self.on_workers("await_published", *arguments)
        except CallRefused as error:  # the first replica has it, so it exists
            raise WeightsUnreachable(f"not every replica could fetch weights {version}: {error}") from error

    async def _wait_fetched(self, arguments: tuple[str, str]) -> None:
        """Wait until the workers of the first replica have it; the others' results are not visible."""
        delay = MIN_FETCH_POLL_S
        while True:
            workers = await self.on_workers("has_published", *arguments)
            if failed := next((worker for worker in workers if worker["problem"]), None):
                raise (WeightsUnreachable if failed["unreachable"] else WeightsError)(failed["problem"])
            if all(worker["done"] for worker in workers):
                return
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_FETCH_POLL_S)

    async def stamp(self, version: str) -> bool:
        """Have vLLM report this version for tokens sampled from now on; False if it does not support that."""
        try:
            await self._post("/update_weight_version", {"new_version": version})
        except _NoSuchRoute:
            return False
        return True

    async def load_adapter(self, name: str, directory: Path) -> None:
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    async def unload_adapter(self, name: str) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def metrics(self) -> Metrics:
        response = await self._call("GET", "/metrics", None, METRICS_TIMEOUT_S)
        try:
            return read_metrics(response.content.decode())
        except (ValueError, OverflowError) as error:
            raise CallRefused(f"vLLM's metrics are invalid: {error}") from error

    async def _post(self, route: str, body: Any = None) -> HttpResponse:
        return await self._call("POST", route, None if body is None else msgspec.json.encode(body), CALL_TIMEOUT_S)

    async def _call(self, method: str, route: str, body: bytes | None, timeout: float) -> HttpResponse:
        """Make one request to vLLM. Raises `CallRefused` and `EngineStopped`."""
        try:
            response = await self.http.request(method, self.url, route, body, timeout)
        except TimeoutError as error:
            raise CallRefused(f"vLLM did not respond to {route} within {timeout:g} s") from error
        except ServerUnreachable as error:
            raise EngineStopped(f"vLLM cannot be reached: {error}") from error
        if response.status == 404 and b'"detail"' in response.content:  # a missing route, not a missing adapter
            raise _NoSuchRoute(f"this vLLM has no {route}")
        if response.status != 200:
            raise CallRefused(server_message(response.content))
        return response


def read_metrics(text: str) -> Metrics:
    """Parse Prometheus' text format."""
    totals: defaultdict[str, float] = defaultdict(float)
    finished: Counter[str] = Counter()
    engines = 0
    for line in text.splitlines():
        if (metric := _METRIC.match(line)) is None:
            continue
        name, value = metric["name"], float(metric["value"])
        totals[name] += value
        engines += name == "kv_cache_usage_perc"
        if name == "request_success_total" and (reason := _REASON.search(metric["labels"])) is not None:
            finished["cancelled" if reason[1] == "abort" else reason[1]] += int(value)
    cached = int(totals["prefix_cache_hits_total"])
    return Metrics(
        running=int(totals["num_requests_running"]),
        kv_usage=totals["kv_cache_usage_perc"] / max(engines, 1),
        tokens_sampled=int(totals["generation_tokens_total"]),
        tokens_computed=max(0, int(totals["prompt_tokens_total"]) - cached),
        tokens_cached=cached,
        preemptions=int(totals["num_preemptions_total"]),
        finished={reason: count for reason, count in finished.items() if count},
    )


class PreemptionCounter:
    """Counts requests that were preempted for lack of KV cache.

    vLLM also counts requests whose cache was cleared for new weights, when the next token of each is computed. As many
    as were running at an update are therefore subtracted from what it counts afterwards.
    """

    def __init__(self) -> None:
        self.count = 0
        self._total = 0
        self._expected = 0

    def expect(self, running: int, limit: int) -> None:
        """Expect `running` preemptions by an update; with those still expected before, at most `limit`."""
        self._expected = min(self._expected + running, limit)

    def update(self, total: int) -> None:
        """Take in vLLM's total."""
        new, self._total = total - self._total, total
        by_update = min(new, self._expected)
        self._expected -= by_update
        self.count += new - by_update


class Adapters:
    """The loaded adapters. `directory` is for copies of their files; with a `max_rank` of 0 none can be loaded."""

    def __init__(self, control: Control, directory: Path, max_rank: int, reader: DirectoryReader) -> None:
        self.max_rank = max_rank
        self._control = control
        self._directory = directory
        self._reader = reader
        self._numbers = itertools.count()
        self._uses: Counter[str] = Counter()
        self._replaced: set[str] = set()
        self.names: dict[str | None, str] = {}
        """vLLM's names by the names in requests; None, for requests without one: the policy, if that is an adapter."""

    def vllm_name(self, name: str) -> str:
        """Return vLLM's name of a loaded adapter. Raises `ModelNotFound`."""
        if name not in self.names:
            raise ModelNotFound(f"no adapter {name!r} is loaded")
        return self.names[name]

    def hold(self, vllm_name: str) -> None:
        """Count a request in flight that uses it."""
        self._uses[vllm_name] += 1

    def release(self, vllm_name: str) -> None:
        self._uses[vllm_name] -= 1
        if not self._uses[vllm_name]:
            del self._uses[vllm_name]

    async def load(self, label: str, directory: Path) -> str:
        """Load an adapter, and return vLLM's name of it, which begins with the label. Raises `WeightsError`."""
        if not self.max_rank:
            raise WeightsError("vLLM was started without adapters. Set inference.vllm.max_lora_rank")
        try:
            config = await self._reader.read_async(directory, lambda: read_config(directory / CONFIG))
        except AdapterError as error:
            raise WeightsError(str(error)) from error
        if config.r > self.max_rank:
            raise WeightsError(f"{directory} has rank {config.r}. Set inference.vllm.max_lora_rank to at least that")
        vllm_name = f"{label}#{next(self._numbers)}"
        copy = self._directory / vllm_name.replace("/", "_")

        def copy_files() -> None:
            copy.mkdir(parents=True)
            for name in (CONFIG, TENSORS):
                shutil.copyfile(require_regular(directory / name), copy / name)

        try:
            await self._reader.read_async(directory, copy_files)
            await self._control.load_adapter(vllm_name, copy)
        except (OSError, CallRefused) as error:
            shutil.rmtree(copy, ignore_errors=True)
            raise WeightsError(f"{directory} cannot be loaded as an adapter: {error}") from error
        return vllm_name

    def use(self, name: str | None, vllm_name: str | None) -> None:
        """Use a loaded adapter, or none, for requests that name `name`; the old one is unloaded when it is unused."""
        if (before := self.names.pop(name, None)) is not None:
            self._replaced.add(before)
        if vllm_name is not None:
            self.names[name] = vllm_name

    async def unload_unused(self) -> None:
        """Unload replaced adapters that no request uses."""
        free = [name for name in self._replaced if not self._uses[name]]
        self._replaced.difference_update(free)  # before the await: another call may be in progress
        for name in free:
            try:
                await self._control.unload_adapter(name)
            except EngineError as error:  # harmless but for its memory
                log.warning("vLLM did not unload the unused adapter %s: %s", name, error)
            shutil.rmtree(self._directory / name.replace("/", "_"), ignore_errors=True)
