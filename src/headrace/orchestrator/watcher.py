"""Follows published weights: drives the engine's update, advances the policy version.

Polls the directory: a rename is atomic on every file system we run on, notification of it is not portable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from headrace.inference.client import EngineClient
from headrace.observe.status import Status, wait_for
from headrace.rollout.version import Version
from headrace.transport.weights import WeightStore, read_marker

log = logging.getLogger(__name__)


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

    async def synchronize(self) -> None:
        """At the start: bring the engine to the newest published version, if it is not there already."""
        served = {Version.parse(health.version) for health in await self._client.health()}
        self.version = min(served)
        latest = self._weights.latest()
        if latest is not None and served != {latest}:
            await self._update(latest)

    async def run(self, notify: Callable[[Version], None]) -> None:
        """For ever: bring the engine to each newer version and call `notify` with it."""
        while True:
            latest = await asyncio.to_thread(self._weights.latest)
            if latest is not None and latest > self.version:
                await self._update(latest)
                notify(latest)
            await asyncio.sleep(self._poll)

    async def _update(self, version: Version) -> None:
        path = self._weights.path(version)
        expected = read_marker(path).checksum
        acknowledged = await wait_for(
            self._client.update_weights(path, version),
            f"acknowledgement of weights {version}",
            "the inference server",
            self._status,
            deadline=self._deadline,
        )
        if acknowledged != expected:
            raise RuntimeError(
                f"the inference server did not load what {path} holds (checksum {acknowledged}, not {expected}): "
                "was the directory changed meanwhile?"
            )
        if version.incarnation > self.version.incarnation:
            log.info("the trainer restarted: following lineage %d at version %d", version.incarnation, version.step)
        self.version = version
        await asyncio.to_thread(self._weights.acknowledge, version)
