"""A model plays: some episodes of some tasks through any server that speaks OpenAI's chat completions.

Episodes run in worker processes, as in a run, and their replies come from the server as messages. Left out: tokens.
Such a server does not tell them, so nothing that is sampled here could be trained on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.environments.base import Environment, EpisodeError, PromptTooLong, Reply, ToolCall
from headrace.environments.probe.probing import Progress
from headrace.environments.probe.replies import untrained_reply
from headrace.environments.probe.report import Problem, Report, Sampled, rewards_of
from headrace.environments.probe.signal import predict
from headrace.environments.workers import WorkerPool
from headrace.errors import BadInput
from headrace.inference.openai_client import OpenAIClient, OpenAIError
from headrace.rollout.types import Message, Rollout, Task

GROUP_SIZES = (4, 8, 16, 32)
TRIES = 4
"""Of a request that may succeed later."""
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
REPLY_TIMEOUT = 300.0
EPISODE_TIMEOUT = 1800.0
WORKERS = 2
FULL = ("context", "max_model_len")
"""How servers say that a conversation is too long."""


class Endpoint(NamedTuple):
    """A server, one of its models (unset: the first), and how to sample."""

    url: str
    model: str | None = None
    api_key_var: str | None = None
    temperature: float = 1.0
    max_tokens: int | None = None
    concurrency: int = 16
    """Episodes at once."""

    def client(self) -> OpenAIClient:
        given = self.url, self.model or "", self.api_key_var
        return OpenAIClient(*given, timeout=REPLY_TIMEOUT, max_concurrent=self.concurrency)

    async def with_model(self) -> Endpoint:
        """With a model's name. A server that has none, or cannot be reached, is refused."""
        if self.model is not None:
            return self
        client = self.client()
        try:
            names = await client.models()
        finally:
            await client.close()
        if not names:
            raise BadInput(f"{self.url} has no model: name one with --endpoint-model")
        return self._replace(model=names[0])


class Line:
    """An episode's context: its questions go to a server."""

    def __init__(self, client: OpenAIClient, temperature: float, max_tokens: int | None) -> None:
        self._client = client
        self._temperature = temperature
        self._max_tokens = max_tokens

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        limits = [limit for limit in (self._max_tokens, max_tokens) if limit is not None]
        sent = as_openai(messages)
        try:
            json.dumps([sent, tools], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise EpisodeError("invalid_message", f"a message or tool cannot be sent as JSON: {error}") from error
        pause = FIRST_PAUSE
        for left in reversed(range(TRIES)):
            try:
                answer = await self._client.chat(
                    sent,
                    tools=tools,
                    temperature=self._temperature,
                    max_tokens=min(limits, default=None),
                )
                return as_reply(answer.message, answer.finish_reason)
            except OpenAIError as error:
                if error.status == 400 and any(word in str(error) for word in FULL):
                    raise PromptTooLong(str(error)) from error
                if not (error.transient and left):
                    raise EpisodeError("endpoint", str(error)) from error
                await asyncio.sleep(min(error.retry_after or pause, LONGEST_PAUSE))
                pause *= 2
        raise AssertionError("the last try returns or raises")


class Sampling:
    """Episodes in worker processes, a few at once, and what went wrong with them."""

    def __init__(self, report: Report, endpoint: Endpoint, progress: Callable[[], None]) -> None:
        self.problems: list[Problem] = []
        # The probe never has the environment in its own process: what it does there could not be ended.
        self._pool = WorkerPool(Environment(), report.environment, report.args, size=WORKERS)
        self._scores_groups = report.opening.scores_groups
        self._client = endpoint.client()
        self._line = Line(self._client, endpoint.temperature, endpoint.max_tokens)
        self._permits = asyncio.Semaphore(endpoint.concurrency)
        self._progress = progress

    async def __aenter__(self) -> Sampling:
        await self._pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()
        await self._client.close()

    async def play_task(self, task: Task, episodes: int) -> list[list[Rollout]]:
        """The rollouts of each episode that came to an end, scored."""
        ended = await asyncio.gather(*(self._play(task) for _ in range(episodes)))
        played = [rollouts for rollouts in ended if rollouts]
        if self._scores_groups and played:
            try:
                await self._pool.score_group([rollout for rollouts in played for rollout in rollouts])
            except EpisodeError as error:
                self.problems += [Problem(error.reason, str(error), error.place)] * len(played)
                return []
        return played

    async def _play(self, task: Task) -> list[Rollout]:
        try:
            async with self._permits, asyncio.timeout(EPISODE_TIMEOUT):
                return await self._pool.run(task, self._line)
        except (EpisodeError, TimeoutError) as error:
            reason = error.reason if isinstance(error, EpisodeError) else "timeout"
            self.problems.append(Problem(reason, str(error), getattr(error, "place", "")))
            return []
        finally:
            self._progress()


async def sample(
    report: Report, tasks: Sequence[Task], endpoint: Endpoint, episodes: int, group_size: int, progress: Progress
) -> Sampled:
    """So many episodes of each task, and what they say about groups."""
    started = time.perf_counter()
    done = itertools.count(1)
    total = episodes * len(tasks)
    async with Sampling(report, endpoint, lambda: progress(f"sampling from {endpoint.model}", next(done), total)) as s:
        by_task = await asyncio.gather(*(s.play_task(task, episodes) for task in tasks))
    rewards = [_rewards(played, s.problems) for played in by_task]
    sizes = {size for size in GROUP_SIZES if size <= episodes} | {group_size}
    return Sampled(
        endpoint.model or "",
        group_size,
        rewards,
        s.problems,
        total,
        sum(any(rollout.truncated for rollout in rollouts) for played in by_task for rollouts in played),
        time.perf_counter() - started,
        [predict(rewards, size) for size in sorted(sizes)] if any(rewards) else [],
    )


def _rewards(played: Sequence[Sequence[Rollout]], problems: list[Problem]) -> list[list[float]]:
    rewards = []
    for rollouts in played:
        try:
            rewards.append(rewards_of(rollouts)[1])
        except EpisodeError as error:
            problems.append(Problem(error.reason, str(error)))
    return rewards


def as_openai(messages: Sequence[Message]) -> list[Message]:
    """Messages as OpenAI's servers want them: arguments as JSON texts, and tool results only for calls that were made.

    What a model was told about a call that could not be read is told by the user. Thoughts stay here: many servers
    refuse them.
    """
    told: list[Message] = []
    known: set[str] = set()
    for given in messages:
        message = {name: value for name, value in given.items() if name != "reasoning_content"}
        if message.get("tool_calls"):
            calls = [_call_as_openai(call) for call in message["tool_calls"]]
            known |= {call["id"] for call in calls}
            told.append({**message, "tool_calls": calls})
        elif message.get("role") == "tool" and message.get("tool_call_id") not in known:
            told.append({"role": "user", "content": message.get("content", "")})
        else:
            told.append(message)
    return told


def _call_as_openai(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def as_reply(message: Message, finish_reason: str) -> Reply:
    """A server's message as a reply: each tool call that it made, those that cannot be run with the reason."""
    given = message.get("tool_calls") or ()
    calls = [_tool_call(number, call) for number, call in enumerate(given)]
    unread = [json.dumps(call) for call, read in zip(given, calls, strict=True) if read.error]
    content = str(message.get("content") or "")
    thought = str(message.get("reasoning_content") or message.get("reasoning") or "")
    return untrained_reply(
        "\n".join([content, *unread]).strip("\n") if unread else content,
        calls,
        raw=f"<think>\n{thought}\n</think>\n\n{content}" if thought else content,
        thought=thought,
        finish_reason="length" if finish_reason == "length" else "stop",
    )


def _tool_call(number: int, call: Any) -> ToolCall:
    """OpenAI's form has the arguments as a JSON text, as the model wrote it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return ToolCall(f"call_{number}", "", {}, "the tool call names no tool")
    identity, given = str(call.get("id") or f"call_{number}"), function.get("arguments") or "{}"
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return ToolCall(identity, function["name"], {}, "the tool call is not valid JSON")
    if not isinstance(arguments, dict):
        return ToolCall(identity, function["name"], {}, "the arguments of a tool call must be a JSON object")
    return ToolCall(identity, function["name"], arguments)
