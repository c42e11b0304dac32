"""`/metrics`: counters of engine and server in Prometheus' text format."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.inference.backend import EngineState
from headrace.observe import tracing
from headrace.observe.prometheus import Histogram, family_head, sample_line

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
OTHER = "other"
"""The label of unknown routes, so that the number of labels is bounded."""


class Metrics:
    """The server's own counters; the engine's are read from its state."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        self.seconds = Histogram(BOUNDS_S)
        self.first_token = Histogram(BOUNDS_S)

    def lines(self, state: EngineState, model_name: str) -> Iterator[str]:
        yield from _engine_lines(state, model_name)
        yield from family_head("headrace_http_requests_total", "counter", "Responses by route and HTTP status.")
        for (route, status), count in sorted(self.responses.items()):
            yield sample_line("headrace_http_requests_total", count, {"route": route, "status": str(status)})
        yield from family_head(
            "headrace_http_request_seconds", "histogram", "Seconds from a request to its response's end."
        )
        yield from self.seconds.lines("headrace_http_request_seconds")
        yield from family_head("headrace_first_token_seconds", "histogram", "Seconds to the first token of streams.")
        yield from self.first_token.lines("headrace_first_token_seconds")


class Measured:
    """ASGI middleware that counts responses and measures their duration, including streams."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        route = scope["path"] if scope["path"] in self._routes else OTHER

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses[route, message["status"]] += 1
            await send(message)

        try:
            with tracing.server_span(scope["headers"], route):
                await self._app(scope, receive, counting)
        finally:
            self._metrics.seconds.observe(time.monotonic() - began)


def _engine_lines(state: EngineState, model_name: str) -> Iterator[str]:
    for name, kind, help_text, value in (
        ("requests_running", "gauge", "Requests that the engine works on.", state.running),
        ("requests_waiting", "gauge", "Requests in the queue.", state.waiting),
        ("requests_capacity", "gauge", "Requests that the engine runs at once.", state.capacity),
        ("kv_cache_usage", "gauge", "Share of the KV cache that running requests hold, 0 to 1.", state.kv_usage),
        ("paused", "gauge", "1 while all requests are suspended.", int(state.paused)),
        ("stands_still", "gauge", "1 while the trainer holds the device lock.", int(state.waits_for_trainer)),
        ("failed", "gauge", "1 if the engine is dead.", int(state.failure is not None)),
        ("tokens_sampled_total", "counter", "Tokens sampled.", state.tokens_sampled),
        ("tokens_computed_total", "counter", "Prompt tokens that went through the model.", state.tokens_computed),
        ("tokens_cached_total", "counter", "Prompt tokens that the prefix cache had.", state.tokens_cached),
        ("tokens_drafted_total", "counter", "Tokens of drafts, in speculative decoding.", state.tokens_drafted),
        ("tokens_accepted_total", "counter", "Tokens of drafts that were sampled.", state.tokens_accepted),
        ("steps_total", "counter", "Forwards of the embedded engine.", state.steps),
        ("prefill_steps_total", "counter", "Those that also computed prompt tokens.", state.prefill_steps),
        ("device_busy_seconds_total", "counter", "Seconds of a GPU on steps.", state.device_busy_s),
        ("device_wait_seconds_total", "counter", "Seconds of waiting for the results of steps.", state.device_wait_s),
        ("preemptions_total", "counter", "Requests that were preempted for lack of KV cache.", state.preemptions),
        ("hand_overs_total", "counter", "Times the device lock was handed to the trainer.", state.hand_overs),
        ("cache_releases_total", "counter", "Hand-overs at which the KV cache was released.", state.cache_releases),
    ):
        yield from family_head(f"headrace_{name}", kind, help_text)
        yield sample_line(f"headrace_{name}", value)
    yield from family_head("headrace_requests_finished_total", "counter", "Requests by how they ended.")
    for reason, count in sorted(state.finished.items()):
        yield sample_line("headrace_requests_finished_total", count, {"reason": reason})
    yield from family_head("headrace_weights_info", "gauge", "The weights that are served.")
    yield sample_line("headrace_weights_info", 1, {"model": model_name, "version": str(state.version)})
