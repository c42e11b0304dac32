"""Simulated hosts and links: latency, bandwidth, loss and partitions, as TCP shows them to an HTTP client.

A lost packet delays a message by a retransmission, and bounds the rate of a long transfer (Mathis et al. 1997). In a
partition, or if a host has lost power, packets vanish: no connection breaks, a message arrives with the first
retransmission after the partition's end, at intervals that double, and a request to a dead host ends by its timeout. A
killed process has its connections closed by its kernel, so its clients see that at once.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.inference.client.engine_client import HEALTH_ROUTE
from headrace.inference.client.http import HttpResponse, ServerUnreachable
from headrace.launch.hosts.base import HostRole

if TYPE_CHECKING:
    from tests.simulation.servers import Server

PACKET_BYTES = 1460
MIN_RETRANSMISSION_S = 0.2
MAX_RETRANSMISSION_S = 120.0
MATHIS = 1.22


@dataclass(frozen=True)
class Link:
    """A path between two sites. `latency_s` is one way."""

    latency_s: float = 0.0002
    bandwidth: float = 3e9
    """Bytes per second of one connection."""
    loss: float = 0.0

    @property
    def retransmission_s(self) -> float:
        """The time until a lost packet is sent again."""
        return max(MIN_RETRANSMISSION_S, 4 * self.latency_s)

    @property
    def throughput(self) -> float:
        """Bytes per second of a long transfer over one connection."""
        if not self.loss:
            return self.bandwidth
        return min(self.bandwidth, MATHIS * PACKET_BYTES / (2 * self.latency_s * math.sqrt(self.loss)))

    def delay(self, size: int, rng: random.Random) -> float:
        """Return how long a message of `size` bytes takes, with retransmissions of its last packets."""
        seconds = self.latency_s + size / self.throughput
        if self.loss:
            wait = self.retransmission_s
            while rng.random() < self.loss:
                seconds += wait
                wait *= 2
        return seconds


@dataclass(eq=False)
class SimulatedHost:
    name: str
    gpus: tuple[str, ...] = ()
    role: HostRole = ""
    site: str = "here"
    slowness: float = 1.0
    """By how much its engines take longer than others'."""
    up: bool = True
    reachable_at: float = 0.0
    """The end of its partition from the hosts of the launcher, the orchestrator and the trainer."""
    hanging: dict[asyncio.Future[None], None] = field(default_factory=dict)
    """Requests to it that wait for a reply which will not come."""

    def answers(self, now: float) -> bool:
        return self.up and now >= self.reachable_at


class Network:
    def __init__(self, loop: asyncio.AbstractEventLoop, rng: random.Random, links: Mapping[str, Link]) -> None:
        """`links` by site: the path from there to the site `here`."""
        self.loop, self.rng, self.links = loop, rng, links
        self.servers: dict[str, Server] = {}
        """By URL, those that listen."""
        self.hosts: dict[str, SimulatedHost] = {}
        """By the authority of a URL: also those on which nothing listens any more."""

    def partition(self, hosts: Collection[SimulatedHost], seconds: float) -> None:
        for host in hosts:
            host.reachable_at = max(host.reachable_at, self.loop.time() + seconds)

    def delay(self, host: SimulatedHost, size: int) -> float | None:
        """Return the seconds until a message between the host and those outside arrives; None: it does not."""
        if not host.up:
            return None
        link, now, wait = self.links[host.site], self.loop.time(), 0.0
        interval = link.retransmission_s
        while now + wait < host.reachable_at:
            wait += interval
            interval = min(2 * interval, MAX_RETRANSMISSION_S)
        return wait + link.delay(size, self.rng)

    async def cross(self, host: SimulatedHost, size: int) -> None:
        """Wait until a message has arrived."""
        delay = self.delay(host, size)
        if delay is None:
            await self.hang(host)
        else:
            await asyncio.sleep(delay)

    async def hang(self, host: SimulatedHost) -> None:
        """Wait for a host that has lost power: until it is back and refuses the connection that it does not know."""
        future: asyncio.Future[None] = self.loop.create_future()
        host.hanging[future] = None
        try:
            await future
        finally:
            del host.hanging[future]

    def reset_connections(self, host: SimulatedHost) -> None:
        for future in list(host.hanging):
            if not future.done():
                future.set_exception(ServerUnreachable("connection reset by peer"))


class SimulatedHttp:
    """`HttpClient` over the simulated network."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def request(
        self, method: str, base_url: str, route: str, body: bytes | None, timeout: float, headers: object = None
    ) -> HttpResponse:
        network = self._network
        host = network.hosts[base_url]
        if route == HEALTH_ROUTE:
            return await self._health(host, base_url, timeout)
        async with asyncio.timeout(timeout):
            await network.cross(host, 200 + len(body or b""))
            server = network.servers.get(base_url)
            if not host.up:
                await network.hang(host)
            if server is None:
                await network.cross(host, 0)
                raise ServerUnreachable("connection refused")
            try:
                response = await server.respond(route, body)
            except ServerUnreachable:
                if host.up:
                    await network.cross(host, 0)
                    raise
                await network.hang(host)
                raise
            await network.cross(host, response.size)
            return HttpResponse(response.status, {}, response.content)

    async def _health(self, host: SimulatedHost, base_url: str, timeout: float) -> HttpResponse:
        """Make the most frequent request with one timer."""
        delay, back = self._network.delay(host, 200), self._network.delay(host, 200)
        if delay is None or back is None or delay + back > timeout:
            await asyncio.sleep(timeout)
            raise TimeoutError
        await asyncio.sleep(delay + back)
        server = self._network.servers.get(base_url)
        if server is None:
            raise ServerUnreachable("connection refused")
        return HttpResponse(200, {}, server.health())

    async def close(self) -> None:
        """Do nothing: there are no connections to close."""
