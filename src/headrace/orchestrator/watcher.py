"""Follows published weights, and brings the engines to them when the pipeline says so.

Polls the directory: a rename is atomic on every file system we run on, notification of it is not portable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.errors import EngineCallError, EngineFailed, EngineRejected, EngineTimeout
from headrace.inference.schema import Health
from headrace.observe.status import Status, WaitTimeout, wait_for
from headrace.rollout.version import Version
from headrace.transport.weights import WeightStore, read_marker
from headrace.transport.weights_link import is_linked

log = logging.getLogger(__name__)

LOOK_AT_ENGINES = 2.0
"""Seconds between two looks at which version the engines serve."""


class WeightWatcher:
    """`version` is what the engine samples from. A rewound trainer publishes a higher incarnation and is followed."""

    def __init__(
        self,
        weights: WeightStore,
        client: EngineClient,
        status: Status,
        *,
        deadline: float,
        poll: float = 0.02,
    ) -> None:
        self.version = Version(0, 0)
        self._weights = weights
        self._client = client
        self._status = status
        self._poll = poll
        self._deadline = deadline
        self._one_at_a_time = asyncio.Lock()
        self._complaint = ""
        """What was last said about engines that were behind."""

    async def synchronize(self) -> None:
        """At the start: bring the engines to the newest published version, if they are not there already."""
        served = await self._served()
        self.version = min(served)
        latest = self._weights.latest()
        if latest is not None and served != {latest}:
            try:
                await self._update(latest)
            except (EngineFailed, EngineRejected) as error:
                # Damaged by a power loss, say: the trainer publishes its own anew.
                log.warning("weights %s cannot be loaded, going on with %s: %s", latest, self.version, error)
        else:
            await asyncio.to_thread(self._weights.acknowledge, self.version)  # so that the trainer knows us here

    async def follow(
        self, notify: Callable[[Version], None], report: Callable[[dict[str, Health]], None] = lambda _: None
    ) -> None:
        """For ever: say which version is the newest, each once, and keep restarted engines up to date.

        At each look at the engines, `report` gets what those say of themselves that answer, by address.
        """
        newest, looked = self.version, time.monotonic()
        while True:
            latest = await asyncio.to_thread(self._weights.latest)
            if latest is not None and latest > newest:
                newest = latest
                notify(latest)
            elif time.monotonic() - looked > LOOK_AT_ENGINES:
                report(await self._catch_up())
                looked = time.monotonic()
            await asyncio.sleep(self._poll)

    async def load(self, version: Version) -> Version:
        """Bring every engine to a published version. Requests in flight go on and finish on the new weights.

        One that cannot be reached while others can gets it once it is back, at a look at the engines.
        What only a trainer's memory has dies with that trainer, and an engine may be too slow for one request. Then
        this tries on, with what is published next, until the deadline; the version that was loaded is returned.
        """
        began, failed = time.monotonic(), None
        async with self._one_at_a_time:
            while True:
                try:
                    await self._update(version)
                    return version
                except (EngineFailed, EngineTimeout) as error:
                    may_pass = isinstance(error, EngineTimeout) or is_linked(self._weights.path(version))
                    if not may_pass or time.monotonic() - began > self._deadline:
                        raise
                    if version != failed:
                        log.warning("trying on, also with newer weights: %s", error)
                    failed = version
                await asyncio.sleep(LOOK_AT_ENGINES)
                latest = await asyncio.to_thread(self._weights.latest)
                version = latest or version

    async def _catch_up(self) -> dict[str, Health]:
        """An engine that was restarted alone may serve another version: give it the current one again.

        Whatever keeps it from that is said, and tried again at the next look; an engine that cannot be reached is
        reported by whoever has requests in flight. Returns how those are that answer.
        """
        async with self._one_at_a_time:
            try:
                engines = await self._client.health_by_url()
            except EngineCallError:
                return {}  # none has said where it listens
            behind = {url: health.version for url, health in engines.items() if health.version != str(self.version)}
            if not behind or self.version not in await asyncio.to_thread(self._weights.published):
                return engines
            found = ", ".join(f"{url} serves {version}" for url, version in behind.items())
            try:
                await self._update(self.version, behind)
                complaint = f"{found} instead of {self.version}: brought up to date"
            except (EngineCallError, WaitTimeout) as error:
                complaint = f"{found} instead of {self.version}, and cannot be brought up to date yet: {error}"
            if complaint != self._complaint:
                log.warning("%s", complaint)
            self._complaint = complaint
            return engines

    async def _served(self) -> set[Version]:
        return {Version.parse(health.version) for health in await self._client.health()}

    async def _update(self, version: Version, engines: Collection[str] | None = None) -> None:
        """Bring every engine, or some, to a version."""
        path = self._weights.path(version)
        expected = read_marker(path).checksum
        acknowledged = await wait_for(
            self._client.update_weights(path, version, engines),
            f"acknowledgement of weights {version}",
            "the inference server",
            self._status,
            deadline=self._deadline,
        )
        if acknowledged != expected:
            raise EngineFailed(
                f"the inference server did not load what {path} holds (checksum {acknowledged}, not {expected}): "
                "was the directory changed meanwhile?"
            )
        if version.incarnation > self.version.incarnation:
            log.info("the trainer restarted: following lineage %d at version %d", version.incarnation, version.step)
        self.version = version
        await asyncio.to_thread(self._weights.acknowledge, version)
