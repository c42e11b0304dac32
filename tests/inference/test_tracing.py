"""Traces of episodes: one per episode, from its turns to a server and back to the credit of its group."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.algorithms.grpo import Grpo
from headrace.config.base import ConfigError
from headrace.config.monitors import OtelConfig
from headrace.environments.base import Environment, ToolCall
from headrace.environments.chat import Chat, Tool, run_call
from headrace.environments.registry import load_environment
from headrace.environments.rewards.running import Rewards
from headrace.environments.workers import WorkerPool
from headrace.observe import tracing
from headrace.orchestrator.dispatcher import Dispatcher, EpisodeRunner
from headrace.orchestrator.processing import TrainProcessing
from headrace.orchestrator.sampler import Sampler
from headrace.orchestrator.signals import Arrival, Episode, Kind
from headrace.rollout.types import Group, Rollout, Task
from headrace.text.renderer import make_renderer
from headrace.text.tokenizer import Tokenizer
from headrace.transport.run_dir import RunDir
from tests.inference.serving import client_of_engine, engine_of

ROUTE = "/inference/v1/generate"


def double(a: int) -> int:
    """Double a number."""
    return 2 * a


class ToolAndReward(Environment):
    """Two turns, a tool between them, and a reward."""

    rewards = Rewards({"length": lambda text, data: float(len(text))})

    async def run(self, task: Task, context: Any) -> list[Rollout]:
        chat = Chat(context, "hello")
        await chat.reply(max_tokens=2)
        await run_call({"double": Tool(double)}, ToolCall("1", "double", {"a": 1}))
        chat.messages.append({"role": "user", "content": "again"})
        await context.chat(chat.messages, max_tokens=2)
        return [chat.rollout(await self.rewards.score("ab", {}))]


@asynccontextmanager
async def sampling(model: Any, directory: Path) -> AsyncIterator[Sampler]:
    tokenizer = Tokenizer(directory)
    async with client_of_engine(engine_of(model, directory), directory) as client:
        yield Sampler(client, make_renderer(directory, tokenizer), tokenizer, seq_len=64, max_tokens=2)


async def run_group(environment: Environment, sampler: Sampler, task: Task, size: int = 2) -> None:
    """Run a group of episodes, and credit it."""
    arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
    processing = TrainProcessing({task.env: Grpo()}, {task.env: environment}, [], [], 64)
    runner = EpisodeRunner(environment, sampler, 60.0, process=processing.process_rollout)
    dispatcher = Dispatcher({("train", task.env): runner}, arrivals.put_nowait)
    group = Group("g", task, size, 0, draw_id=7)
    for index in range(size):
        dispatcher.start(Episode(index, Kind.TRAIN, group, index=index))
    rollouts = [rollout for _ in range(size) for rollout in (await arrivals.get()).rollouts]
    assert [rollout.error for rollout in rollouts] == [None] * size
    await processing.process_group(group, rollouts)
    await dispatcher.close()


@pytest.fixture
def traced(tmp_path: Path) -> Any:
    exporter = InMemorySpanExporter()
    with tracing.tracing(OtelConfig(), RunDir(tmp_path), "test", SimpleSpanProcessor(exporter)):
        yield exporter


def traces_of(exporter: InMemorySpanExporter) -> list[dict[str, list[str]]]:
    """For each trace, the names of spans by the name of their parent, in the order of their beginning."""
    traces: dict[int, dict[int, ReadableSpan]] = {}
    for span in sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0):
        assert span.context is not None
        traces.setdefault(span.context.trace_id, {})[span.context.span_id] = span
    named: list[dict[str, list[str]]] = []
    for spans in traces.values():
        children: dict[str, list[str]] = {}
        for span in spans.values():
            parent = "" if span.parent is None else spans[span.parent.span_id].name
            children.setdefault(parent, []).append(span.name)
        named.append(children)
    return named


async def test_an_episode_is_a_trace_of_turns_requests_tools_rewards_and_credit(
    traced: InMemorySpanExporter, model: Any, model_directory: Path
) -> None:
    async with sampling(model, model_directory) as sampler:
        await sampler.open("no episode", "x").chat([{"role": "user", "content": "hello"}])
        await run_group(ToolAndReward(), sampler, Task("env", {}))
    one = {
        "": ["episode"],
        "episode": ["turn", "tool", "turn", "reward", "credit"],
        "turn": ["generate", "generate"],
        "generate": [ROUTE, ROUTE],
    }
    assert traces_of(traced) == [one, one]
    attributes = next(dict(s.attributes or {}) for s in traced.get_finished_spans() if s.name == "episode")
    assert (attributes["headrace.env"], attributes["headrace.group"]) == ("env", "g")


async def test_turns_of_an_episode_in_a_worker_process_belong_to_its_trace(
    traced: InMemorySpanExporter, model: Any, model_directory: Path
) -> None:
    environment = load_environment("reverse-text", {"num_tasks": 1})
    workers = WorkerPool(environment, "reverse-text", {"num_tasks": 1}, size=1)
    await workers.start()
    try:
        async with sampling(model, model_directory) as sampler:
            await run_group(workers, sampler, Task("env", next(iter(environment.tasks()))))
    finally:
        await workers.close()
    one = {"": ["episode"], "episode": ["turn", "credit"], "turn": ["generate"], "generate": [ROUTE]}
    assert traces_of(traced) == [one, one]


async def test_without_the_section_nothing_is_traced_and_no_header_is_sent(model: Any, model_directory: Path) -> None:
    async with sampling(model, model_directory) as sampler:
        with tracing.span("x") as span:
            assert span is None and tracing.headers() == {}
        await run_group(ToolAndReward(), sampler, Task("env", {}))


def test_a_missing_package_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "opentelemetry.sdk" else find(name))
    tracing.check_installed(OtelConfig(enabled=False))
    with pytest.raises(ConfigError) as refused:
        tracing.check_installed(OtelConfig())
    assert refused.value.key == "[otel]" and "headrace[otel]" in str(refused.value)
