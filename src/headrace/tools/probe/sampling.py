"""Sample episodes with a model behind an OpenAI-compatible server, and predict how many groups have no signal.

Episodes run in worker processes, as in a run. Tokens are left out: chat completions do not return them, so these
episodes cannot be trained on.

A group of g episodes of one task has no signal when the rewards of all its rollouts are equal. Of n episodes of the
task, let k_v be those in which every rollout has reward v. Then

    sum_v C(k_v, g) / C(n, g)

is the share of all groups of g among the n episodes that have no signal. It is unbiased, and tasks are averaged. The
interval (95%) adds two groups of either kind to as many groups as there are tasks, and uses the normal approximation
of a proportion (Agresti and Coull). A task's term lies between 0 and 1, so its variance is at most that of one group:
exact for g = n, wider than necessary for smaller groups.

g > n is left out: how rare the rare rewards of a task are cannot be estimated from fewer episodes. A larger group has
no signal less often, so the value for n is an upper bound.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median_high
from typing import NamedTuple

from headrace.environments.base import Environment, EpisodeError
from headrace.environments.workers import WorkerPool
from headrace.errors import BadInput
from headrace.inference.client.openai_client import hide_password
from headrace.inference.client.served_model import ServedModel
from headrace.rollout.types import Rollout, Task
from headrace.tools.common import ReportProgress
from headrace.tools.evaluate.servers import TextContexts
from headrace.tools.probe.report import EpisodeProblem, ProbeReport, SampledEpisodes, SignalPrediction, episode_rewards

GROUP_SIZES = (4, 8, 16, 32)
RETRY_FOR_S = 10.0
"""Time for which a request that failed for a temporary reason is retried."""
REPLY_TIMEOUT_S = 300.0
EPISODE_TIMEOUT_S = 1800.0
WORKERS = 2
EQUAL_DIGITS = 9
"""Decimal digits to which equal rewards agree."""
ADDED_GROUPS = 2
"""Groups of either kind that the interval adds."""
Z = 1.96


class SamplingEndpoint(NamedTuple):
    """A server, one of its models (None: the first), and sampling parameters."""

    url: str
    model: str | None = None
    api_key_var: str | None = None
    temperature: float = 1.0
    max_tokens: int | None = None
    concurrency: int = 16
    """Concurrent episodes."""

    def served_model(self) -> ServedModel:
        name, key = self.model or "", self.api_key_var
        return ServedModel(name, [self.url], api_key_var=key, timeout=REPLY_TIMEOUT_S, retry_for=RETRY_FOR_S)

    async def with_model(self) -> SamplingEndpoint:
        """Return the endpoint with a model; raises `BadInput` if the server lists none."""
        if self.model is not None:
            return self
        server = self.served_model()
        try:
            names = [model.id for model in await server.clients[0].models()]
        finally:
            await server.close()
        if not names:
            url = hide_password(self.url)
            raise BadInput("the server lists no model", key="--endpoint", value=url, fix="Set --endpoint-model.")
        return self._replace(model=names[0])


class EpisodeSampler:
    """Runs episodes in worker processes and collects their problems."""

    def __init__(self, report: ProbeReport, endpoint: SamplingEndpoint, progress: Callable[[], None]) -> None:
        self.problems: list[EpisodeProblem] = []
        # The environment is never loaded in the probe's own process, where it could not be killed.
        self._pool = WorkerPool(Environment(), report.environment, report.args, size=WORKERS)
        self._scores_groups = report.opening.scores_groups
        self._model = endpoint.served_model()
        sampling = {"temperature": endpoint.temperature, "max_tokens": endpoint.max_tokens}
        self._contexts = TextContexts(self._model, sampling, seed=None)
        self._permits = asyncio.Semaphore(endpoint.concurrency)
        self._progress = progress

    async def __aenter__(self) -> EpisodeSampler:
        await self._pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()
        await self._model.close()

    async def sample_rewards(self, task: Task, episodes: int) -> tuple[list[list[float]], int]:
        """Return the rewards of each scored episode, and the number of truncated episodes."""
        finished = await asyncio.gather(*(self._run(task) for _ in range(episodes)))
        completed = [rollouts for rollouts in finished if rollouts]
        if self._scores_groups and completed:
            try:
                await self._pool.score_group([rollout for rollouts in completed for rollout in rollouts])
            except EpisodeError as error:
                self.problems += [EpisodeProblem(error.reason, str(error), error.place)] * len(completed)
                return [], 0
        rewards = []
        for rollouts in completed:
            try:
                rewards.append(episode_rewards(rollouts)[1])
            except EpisodeError as error:
                self.problems.append(EpisodeProblem(error.reason, str(error)))
        return rewards, sum(any(rollout.truncated for rollout in rollouts) for rollouts in completed)

    async def _run(self, task: Task) -> list[Rollout]:
        try:
            async with self._permits, asyncio.timeout(EPISODE_TIMEOUT_S):
                return await self._pool.run(task, self._contexts.open("", task.key))
        except (EpisodeError, TimeoutError) as error:
            reason = error.reason if isinstance(error, EpisodeError) else "timeout"
            self.problems.append(EpisodeProblem(reason, str(error), getattr(error, "place", "")))
            return []
        finally:
            self._progress()


async def sample(
    report: ProbeReport,
    tasks: Sequence[Task],
    endpoint: SamplingEndpoint,
    episodes: int,
    group_size: int,
    progress: ReportProgress,
) -> SampledEpisodes:
    """Sample `episodes` of each task and predict the signal of groups."""
    started = time.perf_counter()
    done = itertools.count(1)
    total = episodes * len(tasks)

    def report_progress() -> None:
        progress(f"sampling from {endpoint.model}", next(done), total)

    async with EpisodeSampler(report, endpoint, report_progress) as sampler:
        results = await asyncio.gather(*(sampler.sample_rewards(task, episodes) for task in tasks))
    rewards = [of_task for of_task, _ in results]
    sizes = {size for size in GROUP_SIZES if size <= episodes} | {group_size}
    return SampledEpisodes(
        endpoint.model or "",
        group_size,
        rewards,
        sampler.problems,
        total,
        sum(truncated for _, truncated in results),
        time.perf_counter() - started,
        [predict_signal(rewards, size) for size in sorted(sizes)] if any(rewards) else [],
    )


def predict_signal(rewards: Sequence[Sequence[Sequence[float]]], group_size: int) -> SignalPrediction:
    """Predict the share of groups without signal from the rewards by task, episode and agent.

    At least one task must have episodes. A task with fewer episodes than a group is left out if at least half of the
    tasks have enough.
    """
    tasks = [[[round(reward, EQUAL_DIGITS) for reward in episode] for episode in task] for task in rewards if task]
    size = min(group_size, median_high(map(len, tasks)))
    chances: list[dict[float, float]] = []
    """By task and reward: the share of groups in which all rollouts have this reward."""
    for task in tasks:
        if len(task) >= size:
            counts = Counter(episode[0] for episode in task if len(set(episode)) == 1)
            groups = math.comb(len(task), size)
            chances.append({value: math.comb(count, size) / groups for value, count in counts.items()})
    all_rewards = {reward for task in tasks for episode in task for reward in episode}
    middle = (min(all_rewards) + max(all_rewards)) / 2 if len(all_rewards) > 1 else 0.0
    share = sum(sum(chance.values()) for chance in chances) / len(chances)
    low, high = proportion_interval(share, len(chances))
    is_bound = size < group_size
    return SignalPrediction(
        group_size,
        share,
        0.0 if is_bound else low,
        high,
        too_hard=sum(p for chance in chances for value, p in chance.items() if value <= middle) / len(chances),
        too_easy=sum(p for chance in chances for value, p in chance.items() if value > middle) / len(chances),
        is_bound=is_bound,
    )


def proportion_interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95% Agresti-Coull interval of a proportion that is `share` of `count`."""
    total = count + 2 * ADDED_GROUPS
    centre = (share * count + ADDED_GROUPS) / total
    reach = Z * math.sqrt(centre * (1 - centre) / total)
    return max(centre - reach, 0.0), min(centre + reach, 1.0)
