"""Watches for published weights, and loads them into the engines when the pipeline decides so.

Polls the directory: a rename is atomic on every file system we run on; file system notifications are not portable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from headrace.inference.client.engine_client import EngineClient
from headrace.inference.client.errors import (
    EngineCallError,
    EngineFailed,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
)
from headrace.inference.schema import Health
from headrace.observe.status import Status, WaitTimeout, wait_for
from headrace.rollout.version import Version
from headrace.transport.weights import WeightStore, read_marker
from headrace.transport.weights_link import is_linked

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 2.0
"""Interval of the checks of which version the engines serve."""


class WeightWatcher:
    """Loads published versions into the engines; `version` is what they sample from.

    A rewound trainer publishes a higher incarnation.
    """

    def __init__(
        self, weights: WeightStore, client: EngineClient, status: Status, *, deadline_s: float, poll_s: float = 0.02
    ) -> None:
        self.version = Version(0, 0)
        self._weights, self._client, self._status = weights, client, status
        self._deadline_s, self._poll_s = deadline_s, poll_s
        self._lock = asyncio.Lock()
        self._refused: Version | None = None
        """A version that no engine could load at the start."""
        self._logged = ""
        """Last message about engines with another version."""

    async def synchronize(self) -> None:
        """Load the newest published version into the engines at the start, if they do not serve it."""
        engines = await self._client.health_by_url()
        if not engines:
            raise EngineUnavailable("no inference server responds")
        served = {Version.parse(health.version) for health in engines.values()}
        self.version = min(served)
        latest = self._weights.latest()
        if latest is not None and served != {latest}:
            try:
                await self._update(latest)
            except (EngineFailed, EngineRejected) as error:
                # Damaged by a power loss, for example: the trainer publishes its weights again.
                self._refused = latest
                self._status.notify(f"weights {latest} cannot be loaded, continuing with {self.version}: {error}")
        else:
            await asyncio.to_thread(self._weights.acknowledge, self.version)  # so that the trainer sees a follower

    async def follow(
        self, notify: Callable[[Version], None], report: Callable[[dict[str, Health]], None] = lambda _: None
    ) -> None:
        """Run until cancelled: call `notify` once with each new version, and keep restarted engines up to date.

        `report` is called regularly with the health of the reachable engines, by address.
        """
        newest, checked = max(self.version, self._refused or self.version), time.monotonic()
        while True:
            latest = await asyncio.to_thread(self._weights.latest)
            if latest is not None and latest > newest:
                newest = latest
                notify(latest)
            elif time.monotonic() - checked > HEALTH_INTERVAL_S:
                report(await self._update_restarted())
                checked = time.monotonic()
            await asyncio.sleep(self._poll_s)

    async def load(self, version: Version) -> Version:
        """Load a published version into every engine; return the version that was loaded.

        Requests in flight continue on the new weights. An unreachable engine is updated when it is back, if others
        are reachable. Weights that exist only in a trainer's memory are lost with it, and an engine may be too slow
        for one request: then this retries, with newer versions if there are any, until the deadline.
        """
        began, failed = time.monotonic(), None
        async with self._lock:
            while True:
                try:
                    await self._update(version)
                    return version
                except (EngineFailed, EngineTimeout) as error:
                    may_retry = isinstance(error, EngineTimeout) or is_linked(self._weights.path(version))
                    if not may_retry or time.monotonic() - began > self._deadline_s:
                        raise
                    if version != failed:
                        log.warning("retrying, also with newer weights: %s", error)
                    failed = version
                await asyncio.sleep(HEALTH_INTERVAL_S)
                latest = await asyncio.to_thread(self._weights.latest)
                version = latest or version

    async def _update_restarted(self) -> dict[str, Health]:
        """Load the current version into engines that serve another one because they were restarted.

        Failures are logged and retried at the next check. Return the health of the reachable engines; unreachable
        ones are reported by the clients with requests in flight.
        """
        async with self._lock:
            try:
                engines = await self._client.health_by_url()
            except EngineCallError:
                return {}  # no engine has published its address
            behind = {url: health.version for url, health in engines.items() if health.version != str(self.version)}
            if not behind or self.version not in await asyncio.to_thread(self._weights.published):
                return engines
            served = ", ".join(f"{url} serves {version}" for url, version in behind.items())
            try:
                await self._update(self.version, behind)
                message = f"{served} instead of {self.version}: updated"
            except (EngineCallError, WaitTimeout) as error:
                message = f"{served} instead of {self.version}, and cannot be updated yet: {error}"
            if message != self._logged:
                log.warning("%s", message)
            self._logged = message
            return engines

    async def _update(self, version: Version, engines: Collection[str] | None = None) -> None:
        """Load a version into every engine, or into some by address, and acknowledge it to the trainer."""
        path = self._weights.path(version)
        expected = read_marker(path).checksum
        acknowledged = await wait_for(
            self._client.update_weights(path, version, engines),
            f"acknowledgement of weights {version}",
            "the inference server",
            self._status,
            deadline=self._deadline_s,
        )
        if acknowledged != expected:
            raise EngineFailed(
                f"the inference server loaded other weights than {path} has (checksum {acknowledged}, not {expected}): "
                "was the directory changed meanwhile?"
            )
        if version.incarnation > self.version.incarnation:
            log.info("the trainer restarted: following incarnation %d at version %d", version.incarnation, version.step)
        self.version = version
        await asyncio.to_thread(self._weights.acknowledge, version)
