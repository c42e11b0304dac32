"""A model plays: some episodes of some tasks through any server that speaks OpenAI's chat completions.

Episodes run in worker processes, as in a run, and their replies come from the server as messages. Left out: tokens.
Such a server does not tell them, so nothing that is sampled here could be trained on.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace.environments.base import Environment, EpisodeError, Reply
from headrace.environments.openai_chat import chat
from headrace.environments.workers import WorkerPool
from headrace.errors import BadInput
from headrace.inference.client.openai_client import ChatResponse, OpenAIClient, hide_password, retry
from headrace.rollout.types import Message, Rollout, Task
from headrace.tools.probe.probing import Progress
from headrace.tools.probe.report import Problem, Report, Sampled, rewards_of
from headrace.tools.probe.signal import predict

GROUP_SIZES = (4, 8, 16, 32)
TRIES = 4
"""Of a request that may succeed later."""
FIRST_PAUSE = 1.0
REPLY_TIMEOUT = 300.0
EPISODE_TIMEOUT = 1800.0
WORKERS = 2


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
            url = hide_password(self.url)
            raise BadInput("the server lists no model", key="--endpoint", value=url, fix="Set --endpoint-model.")
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

        async def ask(sent: list[Message]) -> ChatResponse:
            how: dict[str, Any] = {"temperature": self._temperature, "max_tokens": min(limits, default=None)}
            pauses = (FIRST_PAUSE * 2**tried for tried in range(TRIES - 1))
            return await retry(lambda: self._client.chat(sent, tools=tools, **how), pauses)

        return await chat(ask, messages, tools, "endpoint")


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
