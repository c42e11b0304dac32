"""`/metrics` as Prometheus reads it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from headrace.inference.backend import EngineState
from headrace.inference.server.metrics import BOUNDS_S, Metrics
from headrace.observe.prometheus import Histogram
from headrace.rollout.version import Version
from tests.inference.serving import backend_of, chat_of, served

STATE = EngineState(Version(1, 7), 3, 2, True, 8, 0.25, 100, 50, 20, 4, {"stop": 5, "length": 1})


def parsed(lines: Iterable[str]) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels."""
    families = text_string_to_metric_families("\n".join([*lines, ""]))
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_the_engine_state_is_exported() -> None:
    samples = parsed(Metrics().lines(STATE, "tiny"))
    names = ("requests_running", "requests_waiting", "paused", "kv_cache_usage", "preemptions_total", "failed")
    assert [samples[f"headrace_{name}",] for name in names] == [3, 2, 1, 0.25, 4, 0]
    names = ("tokens_sampled_total", "tokens_computed_total", "tokens_cached_total", "requests_capacity")
    assert [samples[f"headrace_{name}",] for name in names] == [100, 50, 20, 8]
    assert samples["headrace_requests_finished_total", "stop"] == 5
    assert samples["headrace_weights_info", "tiny", "1-7"] == 1


def test_names_are_escaped() -> None:
    samples = parsed(Metrics().lines(STATE, 'a"b\\c\nd'))
    assert samples["headrace_weights_info", 'a"b\\c\nd', "1-7"] == 1


def test_a_histogram_counts_what_lies_below_each_bound() -> None:
    histogram = Histogram(BOUNDS_S)
    for value in (0.005, 0.006, 400.0):
        histogram.observe(value)
    lines = list(histogram.lines("x"))
    assert lines[:2] == ['x_bucket{le="0.005"} 1', 'x_bucket{le="0.01"} 2']
    assert lines[len(BOUNDS_S) - 1 :] == [
        'x_bucket{le="300.0"} 2',
        'x_bucket{le="+Inf"} 3',
        "x_sum 400.011",
        "x_count 3",
    ]


async def test_requests_are_counted_by_route_and_status_and_unknown_routes_together(
    model: Any, model_directory: Path
) -> None:
    backend = await backend_of(model, model_directory)
    async with served(backend, chat_of(model_directory)) as url, aiohttp.ClientSession(url) as http:
        for body in ({"prompt": "a", "max_tokens": 3}, {"prompt": "a", "stream": True}, {"prompt": ""}):
            await (await http.post("/v1/completions", json=body)).read()
        for path in ("/a", "/b"):
            await (await http.get(path)).read()
        async with http.get("/metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            samples = parsed((await answer.text()).splitlines())
    assert samples["headrace_http_requests_total", "/v1/completions", "200"] == 2
    assert samples["headrace_http_requests_total", "/v1/completions", "400"] == 1
    assert samples["headrace_http_requests_total", "other", "404"] == 2
    assert samples["headrace_http_request_seconds_count",] == 5
    assert samples["headrace_first_token_seconds_count",] == 1
    assert samples["headrace_tokens_sampled_total",] >= 4
