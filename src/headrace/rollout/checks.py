"""Checks that the rollouts of an environment can be recorded, counted and trained on.

Environments are users' code, so a rollout may hold values of any type. It is checked in the process that ran the
episode and again where it arrives. Numbers are converted to floats; a field that cannot be recorded is reset to its
default, and the rollout gets an error that describes the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from headrace.rollout.types import NOT_SAMPLED, Message, Rollout, RolloutError, Sample, Turn
from headrace.safe_text import encodable

LARGEST_REWARD = 1e30
"""Limit of a rollout's absolute reward. Advantages are float32 (at most 3e38): this leaves room for differences,
weights and bonuses of rewards."""
MAX_LOGPROB = 1e-3
"""Limit of a logprob: 0 plus a margin for rounding."""

INVALID_REWARD = "invalid_reward"
INVALID_ROLLOUT = "invalid_rollout"


def checked_rollouts(returned: Any) -> list[Rollout]:
    """Return the result of an environment's `run()` as a list; raise unless it consists of new Rollouts."""
    if not isinstance(returned, list | tuple):
        raise TypeError(f"run() must return a list of Rollout, not {_type_name(returned)}")
    for member in returned:
        if not isinstance(member, Rollout):
            raise TypeError(f"run() must return a list of Rollout, not a list with {_type_name(member)} in it")
    # Rollouts are modified later (group, samples, credit), so none may be returned twice.
    if any(member.group_id for member in returned) or len({id(member) for member in returned}) < len(returned):
        raise ValueError("run() returned the same Rollout object twice: create a new one for each episode")
    return list(returned)


def check_rollout(rollout: Rollout, scored_later: bool, text_only: bool = False, vocab_size: int | None = None) -> None:
    """Set the rollout's `reward`, or its `error` if it cannot be used.

    `scored_later`: the environment sets rewards when the group is complete. `text_only`: the model is an API without
    tokens and logprobs, so nothing is trained on. `vocab_size`: that of the model in training, if any.
    """
    normalize_fields(rollout)
    if rollout.error is not None:
        return
    if rollout.trainable and not text_only and not rollout.completion_tokens:
        rollout.error = RolloutError("empty", "the rollout has no sampled token")
        return
    if rollout.trainable and vocab_size is not None:
        for number, turn in enumerate(rollout.turns):
            if problem := _turn_problem(turn, vocab_size):
                rollout.error = RolloutError(INVALID_ROLLOUT, f"turn {number}: {problem}")
                return
    if not scored_later:
        rollout.reward = total_reward(rollout.rewards)
        if problem := reward_problem(rollout.rewards):
            rollout.error, rollout.reward = RolloutError(INVALID_REWARD, problem), math.nan


def _turn_problem(turn: Turn, vocab_size: int) -> str:
    """Describe the first value of a turn that cannot be trained on; empty if there is none."""
    for name, ids in (("prompt_ids", turn.prompt_ids), ("completion_ids", turn.completion_ids)):
        if ids.view(np.uint32).max(initial=0) >= vocab_size:  # negative ids are large as unsigned
            first = ids[(ids < 0) | (ids >= vocab_size)][0]
            return f"{name} contain {first}, but the vocabulary has {vocab_size} tokens"
    logprobs = turn.logprobs
    if not (logprobs.min(initial=0.0) > -math.inf and logprobs.max(initial=0.0) <= MAX_LOGPROB):  # also for NaN
        invalid = logprobs[~((logprobs > -math.inf) & (logprobs <= MAX_LOGPROB))]
        return f"logprobs contain {invalid[0]:g}: a logprob must be finite and at most 0"
    if turn.versions.min(initial=0) < NOT_SAMPLED:
        return f"versions contain {turn.versions.min()}: versions start at 0, {NOT_SAMPLED} marks tokens not sampled"
    if not 0 < turn.temperature < math.inf:
        return f"temperature = {turn.temperature:g}: it must be finite and above 0"
    return ""


def total_reward(rewards: dict[str, float]) -> float:
    """Return the sum of the rewards, rounded once (.7 + .2 + .1 is exactly 1); NaN if there is none or it overflows."""
    try:
        return math.fsum(rewards.values()) if rewards else math.nan
    except (OverflowError, ValueError):  # too large, or infinities of both signs
        return math.nan


def reward_problem(rewards: dict[str, float]) -> str:
    """Describe what is wrong with the sum of the rewards; empty if nothing is."""
    total = total_reward(rewards)
    if not math.isfinite(total):
        return f"rewards {rewards} do not sum to a finite number"
    if abs(total) > LARGEST_REWARD:
        return f"rewards {rewards} sum to {total:g}: the limit is {LARGEST_REWARD:g}"
    return ""


def normalize_fields(rollout: Rollout) -> None:
    """Convert the fields that the environment filled in; the first invalid one becomes `error` unless one is set."""
    for field, read in _READERS.items():
        try:
            setattr(rollout, field, read(field, getattr(rollout, field)))
        except Exception as error:  # users' types may raise anything when inspected
            setattr(rollout, field, getattr(Rollout(), field))
            reason = INVALID_REWARD if field == "rewards" else INVALID_ROLLOUT
            rollout.error = rollout.error or RolloutError(reason, str(error))


def _read_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {_format(value)}, not a string")
    if encodable(value) != value:
        raise ValueError(f"{name} is {_format(value)}, not valid Unicode")
    return str(value)


def _read_number(name: str, value: Any) -> float:
    if not hasattr(type(value), "__float__"):
        raise TypeError(f"{name} is {_format(value)}, not a number")
    try:
        return float(value)
    except Exception as error:  # an integer too large for a float, an array of several numbers
        raise TypeError(f"{name} is {_format(value)}, not a number: {type(error).__name__}") from error


def _read_numbers(field: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise TypeError(f"{field} are {_format(value)}, not a dict of numbers")
    one = field.removesuffix("s")
    return {_read_text(f"the name of a {one}", key): _read_number(f"{one} {key!r}", x) for key, x in value.items()}


def _read_flag(field: str, value: Any) -> bool:
    if not isinstance(value, int | np.bool_):
        raise TypeError(f"{field} is {_format(value)}, not a bool")
    return bool(value)


def _read_messages(field: str, value: Any) -> list[Message]:
    for message in _check_members(dict, field, value):
        for key in message:
            _read_text("a key of a message", key)
    try:
        msgspec.json.encode(value)  # the format of the record
        msgspec.msgpack.encode(value)  # the format between processes; refuses integers beyond 64 bits
    except Exception as error:
        raise ValueError(f"messages are not JSON: {error}") from error
    return list(value)


def _read_turns(field: str, value: Any) -> list[Turn]:
    for turn in _check_members(Turn, field, value):
        turn.finish_reason = _read_text("the finish_reason of a turn", turn.finish_reason)
        turn.temperature = _read_number("the temperature of a turn", turn.temperature)
        turn.__post_init__()  # the environment may have changed it
    return list(value)


def _read_samples(field: str, value: Any) -> list[Sample]:
    for sample in _check_members(Sample, field, value):
        sample.__post_init__()
    return list(value)


def _check_members(kind: type, field: str, value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(member, kind) for member in value):
        raise TypeError(f"{field} are {_format(value)}, not a list of {kind.__name__}")
    return value


def _read_error(field: str, value: Any) -> RolloutError | None:
    if not isinstance(value, RolloutError | None):
        raise TypeError(f"{field} is {_format(value)}, not a RolloutError")
    return value


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "error": _read_error,
    **dict.fromkeys(("agent", "stop_reason"), _read_text),
    **dict.fromkeys(("trainable", "truncated"), _read_flag),
    **dict.fromkeys(("rewards", "metrics", "timings"), _read_numbers),
    **{"messages": _read_messages, "turns": _read_turns, "samples": _read_samples},
}


def _format(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except Exception:  # a user's `__repr__` may raise
        return _type_name(value)


def _type_name(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
