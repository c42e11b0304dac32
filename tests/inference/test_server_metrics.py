"""`/metrics` as Prometheus reads it."""

import re
from pathlib import Path
from typing import Any

import aiohttp

from headrace.inference.backend import EngineState
from headrace.inference.server.metrics import BOUNDS_S, Histogram, Metrics
from headrace.rollout.version import Version
from tests.inference.serving import backend_of, chat_of, served

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')
STATE = EngineState(Version(1, 7), 3, 2, True, 8, 0.25, 100, 50, 20, 4, {"stop": 5, "length": 1})


def parsed(text: str) -> dict[str, float]:
    """Every sample by its name and labels; each after the help and the type of its family, as the format wants."""
    assert text.endswith("\n")
    samples: dict[str, float] = {}
    family, helped = "", ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped = line.split(" ")[2]
        elif line.startswith("# TYPE "):
            family, kind = line.split(" ")[2:]
            assert family == helped and kind in ("counter", "gauge", "histogram")
            assert not any(name.partition("{")[0] == family for name in samples)
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1].removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") == family
            samples[line.rpartition(" ")[0]] = float(match[3])
    return samples


def test_the_engine_state_is_exported() -> None:
    samples = parsed(Metrics().text(STATE, "tiny"))
    names = ("requests_running", "requests_waiting", "paused", "kv_cache_usage", "preemptions_total", "failed")
    assert [samples[f"headrace_{name}"] for name in names] == [3, 2, 1, 0.25, 4, 0]
    names = ("tokens_sampled_total", "tokens_computed_total", "tokens_cached_total", "requests_capacity")
    assert [samples[f"headrace_{name}"] for name in names] == [100, 50, 20, 8]
    assert samples['headrace_requests_finished_total{reason="stop"}'] == 5
    assert samples['headrace_weights_info{model="tiny",version="1-7"}'] == 1


def test_names_are_escaped() -> None:
    samples = parsed(Metrics().text(STATE, 'a"b\\c\nd'))
    assert samples['headrace_weights_info{model="a\\"b\\\\c\\nd",version="1-7"}'] == 1


def test_a_histogram_counts_what_lies_below_each_bound() -> None:
    histogram = Histogram()
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
            samples = parsed(await answer.text())
    assert samples['headrace_http_requests_total{route="/v1/completions",status="200"}'] == 2
    assert samples['headrace_http_requests_total{route="/v1/completions",status="400"}'] == 1
    assert samples['headrace_http_requests_total{route="other",status="404"}'] == 2
    assert samples["headrace_http_request_seconds_count"] == 5
    assert samples["headrace_first_token_seconds_count"] == 1
    assert samples["headrace_tokens_sampled_total"] >= 4
