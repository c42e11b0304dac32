"""Conversion of a verifiers episode to rollouts: one for each trace, with the turns of its seat."""

from __future__ import annotations

import re
from typing import Any

from headrace.environments.adapters.verifiers.seat import CONTEXT_FULL, Seat, Seats
from headrace.environments.base import EpisodeError
from headrace.rollout.types import Rollout, RolloutError

POLICY = "policy"
"""The agent of a rollout in an environment with one agent."""
ENDED = ("agent_completed", "user_closed")
"""Stop conditions of a run that ended by itself."""
FRAME = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)


def rollouts_of(episode: Any, seats: Seats, single_agent: bool) -> list[Rollout]:
    """Return the rollouts. An error of the episode fails all; one of a trace only that trace, if there are others."""
    if seats.failure is not None and not episode.ok:
        raise seats.failure
    if episode.errors:
        raise _episode_error(episode.errors[-1])
    for trace in episode.traces if len(episode.traces) == 1 else ():
        if not trace.ok:
            raise _episode_error(trace.errors[-1])
    return [
        _rollout(trace, seats.by_trace.get(trace.id), POLICY if single_agent else trace.agent.name)
        for trace in episode.traces
    ]


def _rollout(trace: Any, seat: Seat | None, agent: str) -> Rollout:
    """Return the rollout of a trace. A run that failed in its setup has no seat."""
    metrics: dict[str, float] = {}
    if seat is not None and seat.tools is not None:
        metrics = {"tool_calls": seat.tool_calls, "tool_errors": seat.tool_errors}
    stop_reason = "truncated" if trace.is_truncated else ""
    if trace.stop_condition not in ENDED:
        stop_reason = str(trace.stop_condition or "")
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return Rollout(
        agent=agent,
        trainable=trace.agent.trainable,
        rewards=rewards or {"reward": trace.reward},
        metrics=metrics | {name: value for name, value in trace.metrics.items() if value is not None},
        messages=[seat.wire(message) for message in trace.messages] if seat is not None else [],
        turns=seat.turns if seat is not None else [],
        truncated=trace.is_truncated or trace.stop_condition in (CONTEXT_FULL, "agent_timeout"),
        stop_reason=stop_reason,
        error=_trace_error(trace),
    )


def _trace_error(trace: Any) -> RolloutError | None:
    if not trace.ok:
        return RolloutError(_reason(trace.errors[-1]), trace.errors[-1].message)
    if trace.is_timeout and trace.stop_condition != "agent_timeout":  # in its setup or its scoring
        return RolloutError(trace.stop_condition, f"a time limit of the taskset has expired: {trace.stop_condition}")
    return None


def _episode_error(error: Any) -> EpisodeError:
    """Return the error with the traceback and the place of the first exception."""
    cause = (error.traceback or "").partition("\nThe above exception")[0]
    frames = FRAME.findall(cause)
    place = "{} {}:{}".format(error.type, *frames[-1]) if frames else ""
    return EpisodeError(_reason(error), error.message, place=place, remote_traceback=cause)


def _reason(error: Any) -> str:
    """Return the type of an error in snake case: `task_error`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", error.type).lower()
