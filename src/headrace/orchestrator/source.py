"""Training prompts: an endless weighted draw over the environments, reproducible from the seed.

Draw i picks an environment from (seed, i) among those that are not paused; the environment's sampler picks the task
(without a curriculum: a new permutation for each pass). The state depends only on the outcomes of earlier draws
(`DrawResult`), so a resumed run continues identically. Open draws of an earlier process come first and keep their ids.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from headrace.orchestrator.curriculum import CheckedSampler, Shuffled, TaskSampler
from headrace.orchestrator.signals import ScoredGroup
from headrace.rollout.types import Task
from headrace.transport.journal_entries import GROUP_FAILED, Draw, DrawResult

log = logging.getLogger(__name__)

MAX_FAILED_EPISODES = 16
"""Failed episodes in a row after which an environment is paused."""
FIRST_PAUSE_DRAWS, MAX_PAUSE_DRAWS = 16, 1024


class TrainTasks(msgspec.Struct):
    """Tasks of one training environment and how they are drawn."""

    env: str
    tasks: Sequence[Task]
    weight: float
    sampler: TaskSampler | None = None
    """Chooses the tasks; None for `Shuffled`."""

    def make_sampler(self, seed: int) -> CheckedSampler:
        env_seed = f"{seed}-{self.env}"
        return CheckedSampler(self.env, self.tasks, self.sampler or Shuffled(self.tasks, env_seed), env_seed)


def choose_environment(seed: int, draw: int, weights: Mapping[str, float]) -> str:
    """Return the environment of a draw, among those that have a weight."""
    return random.Random(f"{seed}-{draw}").choices(list(weights), list(weights.values()))[0]


class EnvironmentBreaker(msgspec.Struct):
    """Circuit breaker of an environment whose episodes only fail; outcomes may be recorded in any order.

    After `MAX_FAILED_EPISODES` failed episodes in a row the environment is paused: its draws go to the other
    environments. Then one trial draw tests it; while trials fail, the pauses double. Everything is counted in draws, so
    the state is a function of the draws' outcomes and a resumed run restores it. If all environments are paused, all
    are drawn; `empty_batches` decides whether failures end the run.
    """

    failed: int = 0
    """Failed episodes since the last success."""
    pause: int = 0
    """Length of the current pause in draws; 0: not paused."""
    until: int = 0
    """First draw after the pause."""
    trial: int | None = None
    """Draw that tests the environment again."""
    succeeded: int = -1
    """Newest draw with a success."""

    def is_paused(self, draw: int) -> bool:
        """Return whether draw number `draw` must go to another environment."""
        return bool(self.pause) and (draw < self.until or self.trial is not None)

    def record_draw(self, draw: int) -> None:
        if self.pause and draw >= self.until and self.trial is None:
            self.trial = draw

    def record_success(self, draw: int) -> bool:
        """Record that an episode of `draw` succeeded; return whether that ended a pause."""
        was_paused = self.pause > 0
        if self.failed:
            self.failed, self.pause, self.until, self.trial = 0, 0, 0, None
        self.succeeded = max(draw, self.succeeded)
        return was_paused

    def record_failure(self, draw: int, episodes: int) -> int:
        """Record that all `episodes` of `draw` failed; return the length of the pause that begins, 0 for none."""
        self.record_cancelled(draw)
        if draw < self.succeeded:
            return 0
        self.failed += episodes
        if self.failed < MAX_FAILED_EPISODES or draw < self.until:
            return 0
        self.pause = min(2 * self.pause, MAX_PAUSE_DRAWS) if self.pause else FIRST_PAUSE_DRAWS
        self.until = draw + 1 + self.pause
        return self.pause

    def record_cancelled(self, draw: int) -> None:
        """Record that `draw` ended without success or failure, so that it no longer counts as the trial."""
        if self.trial == draw:
            self.trial = None


class TrainSource:
    """Draws training prompts. `drawn` counts the draws of earlier processes by environment."""

    def __init__(
        self,
        environments: Iterable[TrainTasks],
        seed: int,
        drawn: dict[str, int] | None = None,
        open_draws: Iterable[Draw] = (),
    ) -> None:
        self._seed = seed
        self._weights: dict[str, float] = {}
        self._samplers: dict[str, CheckedSampler] = {}
        for entry in environments:
            if not entry.tasks:
                raise ValueError(f"environment {entry.env!r} has no tasks to train on")
            self._weights[entry.env] = entry.weight
            self._samplers[entry.env] = entry.make_sampler(seed)
        self._drawn = {name: (drawn or {}).get(name, 0) for name in self._samplers}
        self._next_id = sum((drawn or {}).values())
        self._breakers = {name: EnvironmentBreaker() for name in self._samplers}
        self._pending: list[DrawResult] = []
        """Results since the last call of `learn`."""
        self._reopened: deque[tuple[Draw, Task]] = deque()
        self.missing: list[Draw] = []
        """Open draws whose environment or task no longer exists: they can only be dropped."""
        for draw in open_draws:
            task = self._samplers[draw.env].find(draw.task_key) if draw.env in self._samplers else None
            if task is None:
                self.missing.append(draw)
            else:
                self._reopened.append((draw, task))

    def draw(self) -> tuple[Draw, Task]:
        draw, task = self._reopened.popleft() if self._reopened else self._new_draw()
        self._breakers[draw.env].record_draw(draw.id)
        return draw, task

    def add_result(self, result: DrawResult) -> None:
        """Queue the outcome of a draw. Draws do not depend on it before `learn`."""
        self._pending.append(result)

    def learn(self) -> None:
        """Apply the queued results in order: later draws depend on them."""
        for result in self._pending:
            if result.env in self._samplers:
                self._apply(result)
        self._pending.clear()

    def metrics(self) -> dict[str, float]:
        return {name: value for sampler in self._samplers.values() for name, value in sampler.metrics().items()}

    def _new_draw(self) -> tuple[Draw, Task]:
        paused = {name for name, breaker in self._breakers.items() if breaker.is_paused(self._next_id)}
        active = {name: weight for name, weight in self._weights.items() if name not in paused}
        env = choose_environment(self._seed, self._next_id, active or self._weights)
        task = self._samplers[env].draw(self._drawn[env])
        draw = Draw(self._next_id, env, task.key, self._drawn[env], self._samplers[env].observed)
        self._drawn[env] += 1
        self._next_id += 1
        return draw, task

    def _apply(self, result: DrawResult) -> None:
        """Pass the outcome of a draw to the sampler and the circuit breaker of its environment."""
        env, breaker = result.env, self._breakers[result.env]
        if result.rewards:
            self._samplers[env].observe(result.task_key, result.rewards)
            if breaker.record_success(result.draw):
                log.warning("environment %r works again: it is drawn as often as before", env)
        elif not result.failed:
            breaker.record_cancelled(result.draw)
        else:
            pause = breaker.record_failure(result.draw, result.failed)
            if pause and result.error and len(self._samplers) > 1:
                message = "environment %r only fails (%s): paused for the next %d draws, then tried again once"
                log.warning(message, env, result.error, pause)


def result_of(scored: ScoredGroup, step: int) -> DrawResult:
    """Return the outcome of a finished training group, as the source observes it."""
    task = scored.group.task
    rewards = [reward for _, reward in scored.credited]
    result = DrawResult(scored.group.draw_id, task.env, task.key, rewards, step=step, tokens=scored.credited_tokens)
    errors = [rollout.error for rollout, _ in scored.dropped if rollout.error is not None]
    if not scored.reason and len(errors) == scored.arrived and all(error.reason != GROUP_FAILED for error in errors):
        result.failed = scored.arrived
        result.error = f"{errors[-1].reason}: {errors[-1].detail}"
    return result
