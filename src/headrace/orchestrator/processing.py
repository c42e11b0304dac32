"""Processing of rollouts, groups and batches, for training and evaluation.

    level      training                                              evaluation
    rollout    merge turns into samples, score_rollout
    group      group rewards by the environment, drop errors,        group rewards by the environment
               credit, curriculum gate, pre-batch filters
    batch      post-batch filters, score_batch, routing to losses    metrics

All of it runs in background tasks of bounded number: a slow judge, algorithm or teacher delays the groups of its
environment, or its batch, and nothing else. The pipeline decides what happens with the results.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from headrace.algorithms.base import Algorithm, RolloutView, Survivor
from headrace.algorithms.teacher import NO_REFERENCE
from headrace.environments.base import Environment, EpisodeError
from headrace.environments.fault import fault_of
from headrace.errors import Failure
from headrace.imports import name_of
from headrace.inference.client.reference import ReferenceFailed
from headrace.observe import tracing
from headrace.orchestrator.batch_metrics import eval_metrics
from headrace.orchestrator.crediting import PastPolicy
from headrace.orchestrator.gate import GATED, Gate
from headrace.orchestrator.signals import EvalBatch, Kind, ScoredGroup, TrainBatch
from headrace.rollout.checks import INVALID_REWARD, INVALID_ROLLOUT, check_rollout
from headrace.rollout.merge import merge_turns
from headrace.rollout.routing import route_actions, training_problem
from headrace.rollout.types import Group, Rollout, RolloutError, Task
from headrace.transport.journal_entries import GROUP_FAILED, AlgorithmState

log = logging.getLogger(__name__)


class AlgorithmFailed(Failure):
    """An algorithm or a filter failed on a group or a batch, or left a sample that cannot be trained on.

    Ends the run: the algorithm's state may be inconsistent, and the trainer would refuse the batch.
    """


class Filter(msgspec.Struct):
    """A named predicate on one rollout. Without `enforce` it only counts."""

    name: str
    matches: Callable[[Rollout], bool]
    enforce: bool


class GroupScorer:
    """Sets the rewards of environments that score groups. A failed rollout or an invalid reward fails its whole group.

    A rollout that the environment itself marks as failed while it scores fails alone: the rewards of the others take
    that into account, as in the hackable layer. `timeouts` are those of episodes by environment, also used for scoring.
    `text_only`: rollouts have no tokens.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        timeouts: Mapping[str, float | None] = MappingProxyType({}),
        *,
        text_only: bool = False,
    ) -> None:
        self._environments, self._timeouts, self._text_only = environments, timeouts, text_only
        self._logged: set[tuple[str, str]] = set()

    async def score(self, group: Group, rollouts: Sequence[Rollout]) -> None:
        """Set the rewards of a group, or the errors of its rollouts, if its environment scores groups."""
        environment = self._environments[group.task.env]
        if not environment.scores_groups:
            return
        if failed := [rollout.error for rollout in rollouts if rollout.error is not None]:
            _fail_others(rollouts, failed[0])
            return
        error = await self._call_environment(environment, group.task.env, rollouts)
        for rollout in rollouts:  # also after a failure, which may have set some of the rewards
            rollout.error = rollout.error or error
            check_rollout(rollout, scored_later=False, text_only=self._text_only)
        errors = [rollout.error for rollout in rollouts if rollout.error is not None]
        if invalid := [error for error in errors if error.reason in (INVALID_REWARD, INVALID_ROLLOUT)]:
            _fail_others(rollouts, invalid[0])

    async def _call_environment(
        self, environment: Environment, env: str, rollouts: Sequence[Rollout]
    ) -> RolloutError | None:
        """Call `score_group` of an environment; return its error, if any: user code fails its group, not the run."""
        limit = self._timeouts.get(env)
        timer = asyncio.timeout(limit)
        try:
            async with timer:
                await environment.score_group(rollouts)
            return None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0:
                raise  # this task was cancelled, not code inside it
            return self._log_failure(env, error, f"took longer than {limit} s" if timer.expired() else "")

    def _log_failure(self, env: str, error: BaseException, timeout: str) -> RolloutError:
        """Log the first error from each place in the code; return the error for the rollouts."""
        fault = fault_of(error)
        reason, text, place, trace = "environment", fault.text, fault.place, fault.traceback
        if timeout:
            reason, text = "timeout", timeout
        elif isinstance(error, EpisodeError):
            reason, text, place, trace = error.reason, fault.message, error.place, error.remote_traceback
        if (env, place) not in self._logged:
            self._logged.add((env, place))
            message = "%s failed to score a group (%s); further failures like it are only counted\n%s"
            log.error(message, env, text, trace)
        return RolloutError(reason, f"score_group {timeout}" if timeout else f"score_group: {text}")


def _fail_others(rollouts: Iterable[Rollout], failed: RolloutError) -> None:
    """Set an error on the rollouts of a group that have none, because another one failed."""
    for rollout in rollouts:
        if rollout.error is None:
            rollout.error = RolloutError(GROUP_FAILED, f"another member of the group failed: {failed.reason}")


class TrainProcessing:
    """Processing for training; `algorithms`, `environments` and `gates` by environment name.

    With `in_order` groups are credited in the order of the calls, however long their scoring takes.
    """

    def __init__(
        self,
        algorithms: Mapping[str, Algorithm],
        environments: Mapping[str, Environment],
        pre_filters: Sequence[Filter],
        post_filters: Sequence[Filter],
        seq_len: int,
        timeouts: Mapping[str, float | None] = MappingProxyType({}),
        gates: Mapping[str, Gate | None] = MappingProxyType({}),
        *,
        in_order: bool = False,
        past: PastPolicy | None = None,
    ) -> None:
        self._algorithms, self._gates, self._past = algorithms, gates, past
        self._pre_filters, self._post_filters = pre_filters, post_filters
        self._seq_len, self._in_order = seq_len, in_order
        self._group_scorer = GroupScorer(environments, timeouts)
        self._locks = {env: asyncio.Lock() for env in algorithms}
        self._last_done: dict[str, asyncio.Event] = {}
        """Event that is set when the last group passed to `process_group` is credited, by environment."""

    async def process_rollout(self, rollout: Rollout, task: Task) -> None:
        """Merge the turns of a new rollout into samples and call `score_rollout`."""
        if rollout.error is not None:
            return
        rollout.samples = [sample.truncated(self._seq_len) for sample in merge_turns(rollout.turns)]
        if rollout.turns and not rollout.stop_reason:
            rollout.stop_reason = rollout.turns[-1].finish_reason
        if rollout.trainable:
            try:
                await self._algorithms[rollout.env].credit_rollout(RolloutView(rollout, task))
            except ReferenceFailed as failure:
                rollout.error = RolloutError(NO_REFERENCE, str(failure))

    async def process_group(self, group: Group, rollouts: Sequence[Rollout]) -> ScoredGroup:
        """Process a complete group: drop errors, credit the others among themselves, apply gate and filters."""
        previous_done, done = self._last_done.get(group.task.env), asyncio.Event()
        if self._in_order:
            self._last_done[group.task.env] = done
        try:
            await self._group_scorer.score(group, rollouts)
            if previous_done is not None:
                await previous_done.wait()
            return await self._process_survivors(ScoredGroup.of(Kind.TRAIN, group, rollouts))
        finally:
            done.set()

    async def _process_survivors(self, scored: ScoredGroup) -> ScoredGroup:
        """Credit the trainable rollouts that did not fail, then apply gate and filters."""
        task, gate = scored.group.task, self._gates.get(scored.group.task.env)
        scored.untrainable = [rollout for rollout in scored.rollouts if not rollout.trainable]
        scored.rollouts = [rollout for rollout in scored.rollouts if rollout.trainable]
        if not scored.rollouts:
            return scored
        try:
            with tracing.credit_spans(scored.group.id, algorithm=name_of(type(self._algorithms[task.env]))):
                await self._credit(task, scored.rollouts, scored)
            if gate is not None and not gate.keeps([RolloutView(rollout, task) for rollout in scored.rollouts]):
                scored.filter_hits[f"curriculum/{task.env}/gated"] = 1
                scored.dropped += [(rollout, GATED) for rollout in scored.rollouts]
                scored.rollouts = []
            scored.rollouts, dropped = _apply_filters(
                self._pre_filters, scored.rollouts, "pre_filters", scored.filter_hits
            )
            scored.dropped += dropped
        except Exception as error:
            raise AlgorithmFailed(
                f"the algorithm, the gate or a filter of environment {task.env!r} failed on a group of task "
                f"{task.key}: {type(error).__name__}: {error}"
            ) from error
        return scored

    async def _credit(self, task: Task, rollouts: list[Rollout], scored: ScoredGroup) -> None:
        """Have the algorithm credit the rollouts; record their rewards and the algorithm's state in `scored`."""
        algorithm = self._algorithms[task.env]
        views = [RolloutView(rollout, task) for rollout in rollouts]
        scored.credited = [(view.agent, algorithm.with_penalty(view).reward) for view in views]
        for rollout in rollouts:
            rollout.credited = len(rollouts)
        if not algorithm.keeps_state():
            await algorithm.credit_group(views)
            return
        async with self._locks[task.env]:  # the state after this group must not include half of another
            await algorithm.credit_group(views)
            scored.state = AlgorithmState(name_of(type(algorithm)), msgspec.json.encode(algorithm.state()))

    async def process_batch(self, batch: TrainBatch) -> None:
        """Apply the post-batch filters, call `score_batch` on the remaining rollouts, route their tokens to losses."""
        started = time.monotonic()
        survivors: list[Survivor] = []
        by_env: dict[str, list[Survivor]] = {}
        if self._past is not None:
            self._past.use_batch(batch.step)
        try:
            for group in batch.groups:
                kept, dropped = _apply_filters(self._post_filters, group.rollouts, "filters", batch.filter_hits)
                batch.dropped += dropped
                survivors += [Survivor(rollout, group.group.task) for rollout in kept]
                await asyncio.sleep(0)  # a large batch must not block the event loop
            for survivor in survivors:
                by_env.setdefault(survivor.rollout.env, []).append(survivor)
            await asyncio.gather(*[self._algorithms[env].credit_batch(views) for env, views in by_env.items()])
        except Exception as error:
            raise AlgorithmFailed(
                f"an algorithm or a filter failed on a batch of {', '.join(by_env) or 'the run'}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for survivor in survivors:
            self._keep_or_drop(survivor, batch)
            await asyncio.sleep(0)
        for env, algorithm in self._algorithms.items():
            if batch.kept:  # else it does not ship, and the counts go into the next batch
                batch.tallies |= {f"algo/{env}/{name}": value for name, value in algorithm.tally.take().items()}
            dropped_here = [survivor for survivor in by_env.get(env, []) if survivor.drop_reason]
            if dropped_here:
                log.warning(
                    "%d of %d rollouts of %s are not trained on: %s: %s",
                    len(dropped_here), len(by_env[env]), env, dropped_here[0].drop_reason, dropped_here[0].drop_detail,
                )  # fmt: skip
        batch.seconds = time.monotonic() - started

    def _keep_or_drop(self, survivor: Survivor, batch: TrainBatch) -> None:
        """Keep a rollout and route its tokens to the algorithm's loss, unless the algorithm dropped it."""
        if survivor.drop_reason:
            batch.dropped.append((survivor.rollout, survivor.drop_reason))
            return
        batch.kept.append(survivor.rollout)
        algorithm = self._algorithms[survivor.rollout.env]
        for sample in survivor.samples:
            route_actions(sample, algorithm.action_loss_type)
            if problem := training_problem(sample):
                raise AlgorithmFailed(
                    f"algorithm {name_of(type(algorithm))} of environment {survivor.rollout.env!r} left a rollout of "
                    f"task {survivor.task.key} that cannot be trained on: {problem}"
                )


class EvalProcessing(GroupScorer):
    """Processing for evaluation: group rewards and metrics; no credit, no filters."""

    async def process_group(self, group: Group, rollouts: Sequence[Rollout]) -> ScoredGroup:
        await self.score(group, rollouts)
        return ScoredGroup.of(Kind.EVAL, group, rollouts)

    async def process_batch(self, batch: EvalBatch) -> None:
        batch.metrics = eval_metrics(batch)


def _apply_filters(
    filters: Sequence[Filter], rollouts: Iterable[Rollout], slot: str, hits: dict[str, int]
) -> tuple[list[Rollout], list[tuple[Rollout, str]]]:
    """Return the rollouts that no enforced filter matches, and the others with the name of the first that does.

    Matches up to that filter are counted in `hits` as `SLOT/NAME`, enforced or not.
    """
    kept: list[Rollout] = []
    dropped: list[tuple[Rollout, str]] = []
    for rollout in rollouts:
        for entry in filters:
            if entry.matches(rollout):
                key = f"{slot}/{entry.name}"
                hits[key] = hits.get(key, 0) + 1
                if entry.enforce:
                    dropped.append((rollout, entry.name))
                    break
        else:
            kept.append(rollout)
    return kept, dropped
