"""OpenTelemetry traces of episodes, with `[otel]`.

A trace is an episode: its turns, the requests of each to an engine, its tools and rewards, and the credit of its group,
which comes later. Requests carry the W3C header `traceparent`, so that spans of the run's servers belong to the trace.
Without `[otel]` a span costs one comparison, and OpenTelemetry is not imported.

Left out on purpose: texts, which belong to the rollout files; tools and rewards inside of an environment's worker
processes, of which the trace has the turns alone.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a worker of an environment starts without the types of run files
    from headrace.config.monitors import OtelConfig
    from headrace.transport.run_dir import RunDir

EXPORT_TIMEOUT_S = 5.0
MAX_OPEN_GROUPS = 10_000
"""Groups whose episodes are remembered until they get their credit; dropped groups never do."""
EPISODE = "episode"
_NO_SPAN = nullcontext()
_tracer: Any = None
_episodes: OrderedDict[str, list[Any]] = OrderedDict()
"""By group: the contexts of its episodes' spans."""


def check_installed(config: OtelConfig | None) -> None:
    """Raise `ConfigError` if traces are configured and OpenTelemetry is not installed, without importing it."""
    if config is None or not config.enabled:
        return
    from headrace.config.base import ConfigError

    for package in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.exporter.otlp"):
        if importlib.util.find_spec(package) is None:
            fix = "pip install 'headrace[otel]', or remove the section."
            raise ConfigError(f"the package {package} is not installed", key="[otel]", fix=fix)


@contextmanager
def tracing(config: OtelConfig | None, run: RunDir, process: str, processor: Any = None) -> Iterator[None]:
    """Trace while inside. `processor` takes the spans instead of the configured collector."""
    global _tracer
    if config is None or not config.enabled:
        yield
        return
    check_installed(config)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    resource = Resource.create({"service.name": f"headrace-{process}", "headrace.run": run.root.resolve().name})
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(config.share), resource=resource)
    exporter = processor or BatchSpanProcessor(OTLPSpanExporter(config.endpoint, timeout=EXPORT_TIMEOUT_S))
    provider.add_span_processor(exporter)
    _tracer = provider.get_tracer("headrace")
    try:
        yield
    finally:
        _tracer = None
        _episodes.clear()
        provider.shutdown()


def span(name: str, /, **attributes: str | int | float) -> AbstractContextManager[Any]:
    """Return a span of what runs inside, a child of the current one; what belongs to no episode is not traced."""
    if _tracer is None or (name != EPISODE and not headers()):
        return _NO_SPAN
    named = {f"headrace.{key}": value for key, value in attributes.items()}
    return _tracer.start_as_current_span(name, attributes=named)  # type: ignore[no-any-return]


@contextmanager
def episode_span(group: str, **attributes: str | int | float) -> Iterator[None]:
    """Begin a trace, and remember it for the credit of the group."""
    with span(EPISODE, group=group, **attributes) as current:
        if current is not None:
            _episodes.setdefault(group, []).append(current.get_span_context())
            if len(_episodes) > MAX_OPEN_GROUPS:
                _episodes.popitem(last=False)
        yield


@contextmanager
def credit_spans(group: str, **attributes: str | int | float) -> Iterator[None]:
    """Add a span of what runs inside to the trace of every episode of the group."""
    if _tracer is None:
        yield
        return
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    named = {f"headrace.{key}": value for key, value in attributes.items()}
    parents = [set_span_in_context(NonRecordingSpan(context)) for context in _episodes.pop(group, [])]
    spans = [_tracer.start_span("credit", context=parent, attributes=named) for parent in parents]
    try:
        yield
    finally:
        for each in spans:
            each.end()


def headers() -> dict[str, str]:
    """Return the headers that continue the current trace in another process; empty without one."""
    if _tracer is None:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier


def server_span(raw_headers: Iterable[tuple[bytes, bytes]], route: str) -> AbstractContextManager[Any]:
    """Return the span of a request, if its headers continue a trace."""
    if _tracer is None:
        return _NO_SPAN
    return continued({name.decode("latin-1"): value.decode("latin-1") for name, value in raw_headers}, route)


@contextmanager
def continued(carrier: Mapping[str, str], name: str | None = None) -> Iterator[None]:
    """Continue the trace of `headers`, of another process or task; with a `name` in a span of its own."""
    if _tracer is None or "traceparent" not in carrier:
        yield
        return
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = context.attach(TraceContextTextMapPropagator().extract(carrier))
    try:
        with _NO_SPAN if name is None else span(name):
            yield
    finally:
        context.detach(token)
