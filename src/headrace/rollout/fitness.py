"""Whether what an environment returned can be recorded, counted and trained on.

Environments are users' code, so a rollout may hold anything, whatever the types say. It is looked at once more, in the
same way, wherever it enters: in the process that ran the episode, and where it arrives. Numbers become floats, once;
what cannot be recorded is put back to its default, and the rollout becomes an error that says what it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.rollout.types import NOT_SAMPLED, Message, Rollout, RolloutError, Sample, Turn, printable

LARGEST_REWARD = 1e30
"""Credit is kept as float32, which ends at 3e38: differences, weights and bonuses of rewards must fit as well."""
ABOVE_ZERO = 1e-3
"""What rounding may add to the logarithm of a probability."""

INVALID_REWARD = "invalid_reward"
INVALID_ROLLOUT = "invalid_rollout"


def rollouts_of(returned: Any) -> list[Rollout]:
    """What `run()` returned, if it is what it should be."""
    if not isinstance(returned, list | tuple):
        raise TypeError(f"run() must return a list of Rollout, not {_named(returned)}")
    for member in returned:
        if not isinstance(member, Rollout):
            raise TypeError(f"run() must return a list of Rollout, not a list with {_named(member)} in it")
    # What arrives is changed: its group, its samples and its credit are written into it.
    if any(member.group_id for member in returned) or len({id(member) for member in returned}) < len(returned):
        raise ValueError("run() returned a Rollout that it has returned before: make a new one each time")
    return list(returned)


def check(rollout: Rollout, scored_later: bool, in_words: bool = False, vocab_size: int | None = None) -> None:
    """Set `reward`, or `error` if it is unfit. An environment that scores groups gives rewards when all are in.

    `in_words`: who answered tells no tokens, and nobody is going to train on them. `vocab_size` is that of the model
    that is trained on them, if one is.
    """
    clean(rollout)
    if rollout.error is not None:
        return
    if rollout.trainable and not in_words and not rollout.completion_tokens:
        rollout.error = RolloutError("empty", "the rollout has no sampled token")
    elif rollout.trainable and vocab_size is not None and (why := why_unusable(rollout.turns, vocab_size)):
        rollout.error = RolloutError(INVALID_ROLLOUT, why)
    elif not scored_later:
        rollout.reward = total_reward(rollout.rewards)
        if why := why_no_reward(rollout.rewards):
            rollout.error, rollout.reward = RolloutError(INVALID_REWARD, why), math.nan


def why_unusable(turns: Sequence[Turn], vocab_size: int) -> str:
    """What no trainer could compute with, in turns that an environment made or changed; empty if nothing."""
    for number, turn in enumerate(turns):
        if why := _why_unusable(turn, vocab_size):
            return f"turn {number}: {why}"
    return ""


def _why_unusable(turn: Turn, vocab_size: int) -> str:
    for name, ids in (("prompt_ids", turn.prompt_ids), ("completion_ids", turn.completion_ids)):
        if ids.view(np.uint32).max(initial=0) >= vocab_size:  # a negative one is very large so
            return f"{name} hold {ids[(ids < 0) | (ids >= vocab_size)][0]}, and the model has {vocab_size} tokens"
    logprobs = turn.logprobs
    if not (logprobs.min(initial=0.0) > -math.inf and logprobs.max(initial=0.0) <= ABOVE_ZERO):  # nor is NaN either
        unfit = logprobs[~((logprobs > -math.inf) & (logprobs <= ABOVE_ZERO))]
        return f"logprobs hold {unfit[0]:g}, which is no logarithm of a probability above 0"
    if turn.versions.min(initial=0) < NOT_SAMPLED:
        return f"versions hold {turn.versions.min()}; the first is 0, and {NOT_SAMPLED} is for what no version sampled"
    if not 0 < turn.temperature < math.inf:
        return f"the temperature is {turn.temperature:g}, and must be above 0"
    return ""


def total_reward(rewards: dict[str, float]) -> float:
    """Their sum, rounded once: .7, .2 and .1 make 1, which is what counts as right. NaN if there is none."""
    try:
        return math.fsum(rewards.values()) if rewards else math.nan
    except (OverflowError, ValueError):  # beyond all numbers, or infinite in both directions
        return math.nan


def why_no_reward(rewards: dict[str, float]) -> str:
    """What is wrong with their sum; empty if nothing is."""
    total = total_reward(rewards)
    if not math.isfinite(total):
        return f"rewards {rewards} do not sum to a finite number"
    if abs(total) > LARGEST_REWARD:
        return f"rewards {rewards} sum to {total:g}: beyond {LARGEST_REWARD:g} nothing can be credited"
    return ""


def clean(rollout: Rollout) -> None:
    """Read what the environment filled in; the first field that cannot be read is the error, unless there is one."""
    for field, read in _READERS.items():
        try:
            setattr(rollout, field, read(field, getattr(rollout, field)))
        except Exception as error:  # also what a user's own type raises when it is looked at
            setattr(rollout, field, getattr(Rollout(), field))
            reason = INVALID_REWARD if field == "rewards" else INVALID_ROLLOUT
            rollout.error = rollout.error or RolloutError(reason, str(error))


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} is {_shown(value)}, not a text")
    if printable(value) != value:
        raise ValueError(f"{what} is {_shown(value)}, not valid Unicode")
    return str(value)


def _number(what: str, value: Any) -> float:
    if not hasattr(type(value), "__float__"):
        raise TypeError(f"{what} is {_shown(value)}, not a number")
    try:
        return float(value)
    except Exception as error:  # an integer beyond all floats, an array of several numbers
        raise TypeError(f"{what} is {_shown(value)}, not a number: {type(error).__name__}") from error


def _numbers(field: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise TypeError(f"{field} are {_shown(value)}, not a dict of numbers")
    one = field.removesuffix("s")
    return {_text(f"the name of a {one}", name): _number(f"{one} {name!r}", entry) for name, entry in value.items()}


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, int | np.bool_):
        raise TypeError(f"{field} is {_shown(value)}, neither true nor false")
    return bool(value)


def _messages(field: str, value: Any) -> list[Message]:
    for message in _all_of(dict, field, value):
        for key in message:
            _text("a key of a message", key)
    try:
        msgspec.json.encode(value)  # it is recorded so
        msgspec.msgpack.encode(value)  # and travels so; this refuses integers beyond 64 bits
    except Exception as error:
        raise ValueError(f"its messages are not JSON: {error}") from error
    return list(value)


def _turns(field: str, value: Any) -> list[Turn]:
    for turn in _all_of(Turn, field, value):
        turn.finish_reason = _text("the finish_reason of a turn", turn.finish_reason)
        turn.temperature = _number("the temperature of a turn", turn.temperature)
        turn.__post_init__()  # for one that was changed after it was made
    return list(value)


def _samples(field: str, value: Any) -> list[Sample]:
    for sample in _all_of(Sample, field, value):
        sample.__post_init__()
    return list(value)


def _all_of(kind: type, field: str, value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(member, kind) for member in value):
        raise TypeError(f"{field} are {_shown(value)}, not a list of {kind.__name__}")
    return value


def _error(field: str, value: Any) -> RolloutError | None:
    if not isinstance(value, RolloutError | None):
        raise TypeError(f"{field} is {_shown(value)}, not a RolloutError")
    return value


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "error": _error,
    "agent": _text,
    "stop_reason": _text,
    "trainable": _flag,
    "truncated": _flag,
    "rewards": _numbers,
    "metrics": _numbers,
    "timings": _numbers,
    "messages": _messages,
    "turns": _turns,
    "samples": _samples,
}


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except Exception:  # its own `__repr__` does
        return _named(value)


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
