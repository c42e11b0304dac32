"""The work on what arrives, at three levels, for training and evaluation alike.

    level      training                                              evaluation
    rollout    merge turns into samples, rollout-local credit        (nothing to prepare)
    group      scores by the environment, drop errors, credit,       scores by the environment
               the curriculum's gate, pre-batch filters
    batch      post-batch filters, score_batch, routing              the epoch's numbers

All of it runs beside the intake, in bounded tasks: a slow judge, algorithm or teacher delays its own environment's
groups, or its batch, and nothing else. What is decided with the results is the pipeline's business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from headrace.algorithms.base import Algorithm, RolloutView, Survivor
from headrace.algorithms.user_function import name_of
from headrace.environments.base import Environment, EpisodeError
from headrace.environments.fault import fault_of
from headrace.errors import Failure
from headrace.orchestrator.eval_metrics import epoch_metrics
from headrace.orchestrator.gate import GATED, Gate
from headrace.orchestrator.signals import EvalBatch, Kind, ScoredGroup, TrainBatch
from headrace.rollout.checks import INVALID_REWARD, INVALID_ROLLOUT, check_rollout
from headrace.rollout.merge import merge_turns
from headrace.rollout.routing import route_actions, training_problem
from headrace.rollout.types import Group, Rollout, RolloutError, Task
from headrace.transport.journal import GROUP_FAILED, AlgorithmState

log = logging.getLogger(__name__)


class AlgorithmFailed(Failure):
    """An algorithm or a filter raised on a group or a batch, or left what cannot be trained on: the run ends.

    A state may be half changed, and the trainer would refuse the batch.
    """


class Filter(msgspec.Struct):
    """A named test on one rollout. Without `enforce` it only counts."""

    name: str
    matches: Callable[[Rollout], bool]
    enforce: bool


class GroupScores:
    """Rewards from environments that score groups. One failed member costs the group: it cannot be scored without.

    So does one whose score is no number. One that the environment itself marks as failed while it scores does not: it
    has scored the others in that knowledge, as the rewards of the hackable layer do.
    `timeouts` are those of an episode, by environment: scoring its group may take as long. `text_only`:
    rollouts have no tokens.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        timeouts: Mapping[str, float | None],
        *,
        text_only: bool = False,
    ) -> None:
        self._environments = environments
        self._timeouts = timeouts
        self._text_only = text_only
        self._reported: set[tuple[str, str]] = set()

    async def apply(self, group: Group, rollouts: Sequence[Rollout]) -> None:
        environment = self._environments[group.task.env]
        if not environment.scores_groups:
            return
        if failed := [rollout.error for rollout in rollouts if rollout.error is not None]:
            _fail(rollouts, _because_of(failed[0]))
            return
        error = await self._score(environment, group.task.env, rollouts)
        if error is not None:
            _fail(rollouts, error)
        for rollout in rollouts:  # also after a failure, which may have come halfway
            check_rollout(rollout, scored_later=False, text_only=self._text_only)
        errors = [rollout.error for rollout in rollouts if rollout.error is not None]
        if unfit := [error for error in errors if error.reason in (INVALID_REWARD, INVALID_ROLLOUT)]:
            _fail(rollouts, _because_of(unfit[0]))

    async def _score(self, environment: Environment, env: str, rollouts: Sequence[Rollout]) -> RolloutError | None:
        """Why the group could not be scored: whatever a user's environment raises costs its group, not the run."""
        limit = self._timeouts.get(env)
        clock = asyncio.timeout(limit)
        try:
            async with clock:
                await environment.score_group(rollouts)
            return None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                raise
            return self._reported_error(env, error, f"took longer than {limit} s" if clock.expired() else "")

    def _reported_error(self, env: str, error: BaseException, too_long: str) -> RolloutError:
        """The first error from a place is told in full; the rest are counted."""
        fault = fault_of(error)
        reason, text, place, trace = "environment", fault.text, fault.place, fault.traceback
        if too_long:
            reason, text = "timeout", too_long
        elif isinstance(error, EpisodeError):
            reason, text, place, trace = error.reason, fault.message, error.place, error.remote_traceback
        if (env, place) not in self._reported:
            self._reported.add((env, place))
            log.error("%s failed to score a group (%s); further failures alike are only counted\n%s", env, text, trace)
        return RolloutError(reason, f"score_group {too_long}" if too_long else f"score_group: {text}")


def _is_being_cancelled() -> bool:
    """Whether somebody cancelled this task, rather than the code in it itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _because_of(failed: RolloutError) -> RolloutError:
    return RolloutError(GROUP_FAILED, f"another member of the group failed: {failed.reason}")


def _fail(rollouts: Iterable[Rollout], error: RolloutError) -> None:
    for rollout in rollouts:
        if rollout.error is None:
            rollout.error = error


class TrainProcessing:
    """`algorithms`, `environments` and `gates` by environment name.

    With `in_order` groups are credited in the order in which they were handed in, whatever their scores took.
    """

    def __init__(
        self,
        algorithms: Mapping[str, Algorithm],
        environments: Mapping[str, Environment],
        pre_filters: Sequence[Filter],
        post_filters: Sequence[Filter],
        seq_len: int,
        timeouts: Mapping[str, float | None] = MappingProxyType({}),
        gates: Mapping[str, Gate] = MappingProxyType({}),
        *,
        in_order: bool = False,
    ) -> None:
        self._algorithms = algorithms
        self._group_scores = GroupScores(environments, timeouts)
        self._pre_filters = pre_filters
        self._post_filters = post_filters
        self._seq_len = seq_len
        self._gates = gates
        self._one_by_one = {env: asyncio.Lock() for env in algorithms}
        self._in_order = in_order
        self._last = {env: _happened() for env in algorithms}
        """By environment, when the group that was handed in last is done with."""

    async def process_rollout(self, rollout: Rollout, task: Task) -> None:
        """On arrival: merge its turns into samples, give rollout-local credit."""
        if rollout.error is not None:
            return
        rollout.samples = [sample.truncated(self._seq_len) for sample in merge_turns(rollout.turns)]
        if rollout.turns and not rollout.stop_reason:
            rollout.stop_reason = rollout.turns[-1].finish_reason
        if rollout.trainable:
            await self._algorithms[rollout.env].score_rollout(RolloutView(rollout, task))

    async def process_group(self, group: Group, rollouts: Sequence[Rollout]) -> ScoredGroup:
        """The group is complete: drop errors, credit the survivors among themselves, apply gate and filters."""
        before, done = self._join(group.task.env)
        try:
            await self._group_scores.apply(group, rollouts)
            await before.wait()
            return await self._process_survivors(_without_errors(Kind.TRAIN, group, rollouts))
        finally:
            done.set()

    def _join(self, env: str) -> tuple[asyncio.Event, asyncio.Event]:
        """What a group's credit must wait for, and what waits for its."""
        before, done = self._last[env], asyncio.Event()
        if self._in_order:
            self._last[env] = done
        return before, done

    async def _process_survivors(self, scored: ScoredGroup) -> ScoredGroup:
        task = scored.group.task
        alive = [rollout for rollout in scored.rollouts if rollout.trainable]
        try:
            if alive:
                await self._credit(task, alive, scored)
            scored.rollouts, dropped = self._apply_gate(task, alive, scored.filter_hits)
            scored.dropped += dropped
            scored.rollouts, dropped = _apply(self._pre_filters, scored.rollouts, "pre_filters", scored.filter_hits)
            scored.dropped += dropped
        except Exception as error:
            raise AlgorithmFailed(
                f"the algorithm, the gate or a filter of environment {task.env!r} failed on a group of task "
                f"{task.key}: {type(error).__name__}: {error}"
            ) from error
        return scored

    def _apply_gate(
        self, task: Task, alive: list[Rollout], hits: dict[str, int]
    ) -> tuple[list[Rollout], list[tuple[Rollout, str]]]:
        gate = self._gates.get(task.env)
        if gate is None or not alive or gate.keeps([RolloutView(rollout, task) for rollout in alive]):
            return alive, []
        hits[f"curriculum/{task.env}/gated"] = 1
        return [], [(rollout, GATED) for rollout in alive]

    async def _credit(self, task: Task, alive: list[Rollout], scored: ScoredGroup) -> None:
        algorithm = self._algorithms[task.env]
        views = [RolloutView(rollout, task) for rollout in alive]
        scored.credited = [(rollout.agent, rollout.reward) for rollout in alive]
        for rollout in alive:
            rollout.credited = len(alive)
        if not algorithm.keeps_state():
            await algorithm.score_group(views)
            return
        async with self._one_by_one[task.env]:  # the state after this group must not hold half of another
            await algorithm.score_group(views)
            scored.state = AlgorithmState(name_of(type(algorithm)), msgspec.json.encode(algorithm.state()))

    async def process_batch(self, batch: TrainBatch) -> None:
        """Apply post-batch filters, let each algorithm see its survivors once more, send their tokens to its loss."""
        started = time.monotonic()
        survivors: list[Survivor] = []
        by_env: dict[str, list[Survivor]] = {}
        try:
            for group in batch.groups:
                kept, dropped = _apply(self._post_filters, group.rollouts, "filters", batch.filter_hits)
                batch.dropped += dropped
                survivors += [Survivor(rollout, group.group.task) for rollout in kept]
                await asyncio.sleep(0)  # a large batch must not hold up the intake
            for survivor in survivors:
                by_env.setdefault(survivor.rollout.env, []).append(survivor)
            await asyncio.gather(*[self._algorithms[env].score_batch(views) for env, views in by_env.items()])
        except Exception as error:
            raise AlgorithmFailed(
                f"an algorithm or a filter failed on a batch of {', '.join(by_env) or 'the run'}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for survivor in survivors:
            self._settle(survivor, batch)
            await asyncio.sleep(0)
        for env, algorithm in self._algorithms.items():
            if batch.kept:  # else it does not ship: counting goes on into the one that does
                batch.tallies |= {f"algo/{env}/{name}": value for name, value in algorithm.tally.take().items()}
            _tell_drops(env, by_env.get(env, []))
        batch.seconds = time.monotonic() - started

    def _settle(self, survivor: Survivor, batch: TrainBatch) -> None:
        """Ship it, its tokens on their way to the loss that its algorithm declares, unless that has dropped it."""
        if survivor.drop_reason:
            batch.dropped.append((survivor.rollout, survivor.drop_reason))
            return
        batch.kept.append(survivor.rollout)
        algorithm = self._algorithms[survivor.rollout.env]
        for sample in survivor.samples:
            route_actions(sample, algorithm.action_loss_type)
            if why := training_problem(sample):
                raise AlgorithmFailed(
                    f"algorithm {name_of(type(algorithm))} of environment {survivor.rollout.env!r} left a rollout of "
                    f"task {survivor.task.key} that cannot be trained on: {why}"
                )


class EvalProcessing:
    """No credit, no filters."""

    def __init__(
        self,
        environments: Mapping[str, Environment],
        timeouts: Mapping[str, float | None] = MappingProxyType({}),
        *,
        text_only: bool = False,
    ) -> None:
        self._group_scores = GroupScores(environments, timeouts, text_only=text_only)

    async def process_rollout(self, rollout: Rollout, task: Task) -> None:
        """Evaluation needs the reward alone."""

    async def process_group(self, group: Group, rollouts: Sequence[Rollout]) -> ScoredGroup:
        await self._group_scores.apply(group, rollouts)
        return _without_errors(Kind.EVAL, group, rollouts)

    async def process_batch(self, batch: EvalBatch) -> None:
        batch.metrics = epoch_metrics(batch)


def _happened() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def _tell_drops(env: str, survivors: Sequence[Survivor]) -> None:
    dropped = [survivor for survivor in survivors if survivor.drop_reason]
    if dropped:
        log.warning(
            "%d of %d rollouts of %s are not trained on: %s: %s",
            len(dropped), len(survivors), env, dropped[0].drop_reason, dropped[0].drop_detail,
        )  # fmt: skip


def _without_errors(kind: Kind, group: Group, rollouts: Sequence[Rollout]) -> ScoredGroup:
    return ScoredGroup(
        kind,
        group,
        [rollout for rollout in rollouts if rollout.error is None],
        [(rollout, rollout.error.reason) for rollout in rollouts if rollout.error is not None],
        arrived=len(rollouts),
        sampled_tokens=sum(rollout.completion_tokens for rollout in rollouts),
    )


def _apply(
    filters: Sequence[Filter], rollouts: Iterable[Rollout], slot: str, hits: dict[str, int]
) -> tuple[list[Rollout], list[tuple[Rollout, str]]]:
    """Which of the rollouts stay, and which go for what reason."""
    kept: list[Rollout] = []
    dropped: list[tuple[Rollout, str]] = []
    for rollout in rollouts:
        reason = _why_dropped(rollout, filters, slot, hits)
        if reason is None:
            kept.append(rollout)
        else:
            dropped.append((rollout, reason))
    return kept, dropped


def _why_dropped(rollout: Rollout, filters: Sequence[Filter], slot: str, hits: dict[str, int]) -> str | None:
    """The first enforced filter that matches. Matches up to it are counted as `SLOT/NAME`, enforced or not."""
    for entry in filters:
        if entry.matches(rollout):
            key = f"{slot}/{entry.name}"
            hits[key] = hits.get(key, 0) + 1
            if entry.enforce:
                return entry.name
    return None
