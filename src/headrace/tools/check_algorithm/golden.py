"""Worked numbers: small groups whose credit is known from the definitions, worked by hand.

Each names its own settings, so they hold whatever a run has set. Lengths are in tokens, `seq_len` is 1000.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.config.algorithms import AlgorithmConfig
from headrace.rollout.types import Rollout, Task
from headrace.tools.check_algorithm.cases import ANSWER, Author, Case, bare_rollout
from headrace.tools.check_algorithm.comparing import close
from headrace.tools.check_algorithm.playing import HookFailed, Session
from headrace.tools.check_algorithm.report import Verdict
from headrace.tools.check_algorithm.settings import algorithm_config
from headrace.tools.check_algorithm.stage import END, Stage, StandIn
from headrace.tools.check_algorithm.trial import subject_of


class Golden(msgspec.Struct, frozen=True):
    """`expected`, rollout by rollout: a number on the last token, a list on the sample or its completion, or None."""

    rollouts: Callable[[Stage], list[Rollout]]
    expected: list[Any]
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    stream: str = "advantages"
    model: Callable[[Stage], StandIn] = lambda stage: StandIn()


def _group(rewards: Sequence[float], lengths: Sequence[int] | int = 2, **more: Any) -> Callable[[Stage], list[Rollout]]:
    sizes = [lengths] * len(rewards) if isinstance(lengths, int) else lengths
    shapes = [{name: value[n] for name, value in more.items()} for n in range(len(rewards))]
    return lambda _: [bare_rollout(r, size, **shape) for r, size, shape in zip(rewards, sizes, shapes, strict=True)]


def _with(**penalty: Any) -> dict[str, Any]:
    return {"length_penalty": penalty}


_GROUP_CREDIT = (
    Golden(_group([1, 0, 0, 0]), [0.75, -0.25, -0.25, -0.25]),
    Golden(_group([0.3] * 6), [0.0] * 6),
    # mean .5, standard deviation .5
    Golden(_group([1, 1, 0, 0]), [1, 1, -1, -1], {"normalize": "std"}),
    # B(r) = 100 / 400
    Golden(_group([1, 0], [100, 300]), [0.75, -0.25], {"length_weighted_baseline": True}),
    # p = .25 * .5 * tokens / 1000 = .0125, .025, .0125, .025; its mean .01875
    Golden(
        _group([1, 1, 0, 0], [100, 200, 100, 200]),
        [0.50625, 0.49375, -0.49375, -0.50625],
        _with(type="linear"),
    ),
    # only the correct pay: p = .0125, .025, 0, 0; its mean .009375
    Golden(
        _group([1, 1, 0, 0], [100, 200, 100, 200]),
        [0.496875, 0.484375, -0.490625, -0.490625],
        _with(type="linear", gate_by_correctness=True),
    ),
    # all correct: the penalty alone is the signal. p = .025, .075
    Golden(_group([1, 1], [100, 300]), [0.025, -0.025], _with(type="linear")),
    # a negative pass rate would make a bonus of it
    Golden(_group([-1, 0], [100, 300]), [-0.5, 0.5], _with(type="linear")),
    # of the correct 20 is the mean: r' = 1.5, 1, 0, 1; its mean .875
    Golden(_group([1, 1, 0, 1], [10, 30, 20, 20]), [0.625, 0.125, -0.875, 0.125], _with(type="tokens")),
    # r' = 1 + (1 - 2 / 3), 1, 0; its mean 7 / 9
    Golden(_group([1, 1, 0], 8, turns=[2, 4, 1]), [4 / 3 - 7 / 9, 1 - 7 / 9, -7 / 9], _with(type="turns")),
    # p = 0, .5, 1
    Golden(_group([1, 1, 1], [80, 90, 100]), [0.5, 0, -0.5], _with(type="overlong", max_tokens=100, cache_tokens=20)),
)


def _heard(stage: Stage) -> list[Rollout]:
    """A prompt of 1, a completion of 1, a tool's 2, a completion of 1; and the same with another reward."""
    return [bare_rollout(reward, 2, turns=2, tool_tokens=2) for reward in (1, 0)]


def _distance_from_end(stage: Stage) -> StandIn:
    """Its opinion of a token is how far it is from the end: what comes before a sample does not show."""
    return StandIn(lambda ids: np.arange(-len(ids), 0, dtype=np.float64))


_CONTRAST = {"yes.": [-0.1, -1.0, -0.5], "no. ": [-0.1, -1.02, -1.0], "nay.": [-0.2, -0.98, -2.0]}
"""What a teacher thinks of the three tokens of `ab` after each hint."""
_REWARD_OF_FOUR_TENTHS = 0.10955
"""x of the rewards x, 1, 0, 0 whose standardized credit is -.4: the smaller root of 8.52 x^2 - 5.68 x + .52 = 0."""


def _siblings(stage: Stage) -> list[Rollout]:
    author = Author(stage, 0)
    said = (("ab", _REWARD_OF_FOUR_TENTHS), ("yes.", 1), ("no. ", 0), ("nay.", 0))
    return [author.answer(reward, text) for text, reward in said]


def _contrasting(stage: Stage) -> StandIn:
    def opinion(ids: np.ndarray) -> np.ndarray:
        scores = np.full(len(ids), -1.0)
        text = stage.tokenizer.decode(ids.tolist())
        if text.endswith(f"ab{END}"):
            hint = next((hint for hint in _CONTRAST if hint in text), None)
            scores[-3:] = -1.0 if hint is None else _CONTRAST[hint]
        return scores

    return StandIn(opinion)


_PLAYERS = _group([1, -1, -1, 1], agent=["a", "b"] * 2, episode=[0, 0, 1, 1])
_PROPOSED = _group([1, 1, 0, 0, 1, 1], agent=["proposer", "solver", "solver"] * 2, episode=[0, 0, 0, 1, 1, 1])

GOLDEN: dict[str, tuple[Golden, ...]] = {
    "grpo": _GROUP_CREDIT,
    "max_rl": (
        Golden(_group([1, 0, 0, 0]), [3, -1, -1, -1]),
        Golden(_group([0, 0, 0]), [0, 0, 0]),
        Golden(_group([-1, 0]), [0, 0]),
    ),
    "reward": (Golden(_group([1, 0.25, -2]), [1, 0.25, -2]),),
    "echo": (
        *_GROUP_CREDIT,
        Golden(_heard, [[0, 0, 0.1, 0.1, 0]] * 2, stream="ce_weights"),
        Golden(_heard, [[0, 0.5, 0.5, 0.5, 0.5], [0, -0.5, -0.5, -0.5, -0.5]]),
        Golden(_heard, [None, None], {"roles": {"user": {"alpha": 1.0}}}, stream="ce_weights"),
    ),
    "opd": (
        Golden(_group([1, 0], 2), [[-3, -2, -1]] * 2, stream="ref_logprobs", model=_distance_from_end),
        Golden(_group([1, 0], 2), [[0, 1, 1]] * 2, stream="ref_kl_weights"),
        Golden(_group([1, 0], 2), [[0, 0, 0]] * 2, stream="rl_weights"),
    ),
    "opsd": (
        Golden(_group([1, 0], 2), [[-3, -2, -1]] * 2, stream="ref_logprobs", model=_distance_from_end),
        Golden(_group([1, 0], 2), [[0, 1, 1]] * 2, stream="ref_kl_weights"),
    ),
    "sft": (
        Golden(_group([1, 0], 2), [[0, 1, 1]] * 2, stream="ce_weights"),
        Golden(_group([1, 0], 2), [[0, 0, 0]] * 2, stream="rl_weights"),
    ),
    "rlcsd": (
        # Nobody is correct, so there is no contrast: mean .5, standard deviation .5
        Golden(_group([1, 1, 0, 0]), [1, 1, -1, -1], {"correct_threshold": 2.0}),
        # p = .0125, .025, .0125, .025 is centered around .01875, and not divided by the deviation
        Golden(
            _group([1, 1, 0, 0], [100, 200, 100, 200]),
            [1.00625, 0.99375, -0.99375, -1.00625],
            {"correct_threshold": 2.0, **_with(type="linear")},
        ),
        # e = .048751, -.0002, .879885, so the second token alone is not modulated, and counts threefold
        Golden(_siblings, [[0, -1.2, 0]], model=_contrasting),
    ),
    "rae": (
        # b is 0, then .05, then .0475
        Golden(_group([1, 0, 1]), [1, -0.05, 0.9525]),
        # b is 0, then .5, then .25
        Golden(_group([1, 0, 1]), [1, -0.5, 0.75], {"decay": 0.5}),
        # each agent has its own: .05 and -.05 after the first episode
        Golden(_PLAYERS, [1, -1, -1.05, 1.05]),
    ),
    "hierarchical_grpo": (
        Golden(_group([1, 0, 0, 0]), [0.75, -0.25, -0.25, -0.25]),
        Golden(_group([0.3] * 6), [0.0] * 6),
        # proposers 1, 0; solvers 1, 0, 1, 1
        Golden(_PROPOSED, [0.5, 0.25, -0.75, -0.5, 0.25, 0.25]),
        # solvers 1, 0 in one episode; 1, 1 in the other
        Golden(_PROPOSED, [0.5, 0.5, -0.5, -0.5, 0, 0], {"episode_agents": ["solver"]}),
        # one proposer in each episode, and nobody to compare it with
        Golden(_PROPOSED, [0, 0.25, -0.75, 0, 0.25, 0.25], {"episode_agents": ["proposer"]}),
    ),
}


async def worked_numbers(config: AlgorithmConfig, stage: Stage) -> Verdict:
    worked = GOLDEN.get(config.type, ())
    if not worked:
        return Verdict("does not apply", "there are none for an algorithm of your own")
    for golden in worked:
        try:
            problem = await _problem(config.type, golden, stage)
        except HookFailed as failure:
            problem = str(failure)
        if problem:
            return Verdict("fails", problem)
    return Verdict("holds", str(len(worked)))


async def _problem(kind: str, golden: Golden, stage: Stage) -> str:
    """What came out, if it is not what was expected."""
    config = algorithm_config({"type": kind, **golden.settings}, "worked numbers")
    model = golden.model(stage)
    rollouts = golden.rollouts(stage)
    for rollout in rollouts:
        rollout.env, rollout.group_id = "env", "group"
    async with Session.of(subject_of(config), model, stage.host(model)) as session:
        played = await session.credit(Case("worked numbers", Task("env", ANSWER, "task"), rollouts))
        await session.ship([played])
    for number, expected in enumerate(golden.expected):
        sample = played.credited.rollouts[number].samples[0]
        shown = _like(sample.streams.get(golden.stream), expected, sample.prompt_length)
        if not _is_as_expected(shown, expected):
            rewards = [rollout.reward for rollout in rollouts]
            told = f"{golden.stream} {None if shown is None else np.round(shown, 6).tolist()}, not {expected}"
            return f"rewards {rewards}, settings {golden.settings}: rollout {number} has {told}"
    return ""


def _like(found: np.ndarray | None, expected: Any, prompt_length: int) -> np.ndarray | None:
    """What was found, in the form in which it is expected: a number, the whole sample, or the completion alone."""
    if found is None or expected is None:
        return found
    if not isinstance(expected, list):
        return found[-1:]
    return found if len(expected) == len(found) else found[prompt_length:]


def _is_as_expected(shown: np.ndarray | None, expected: Any) -> bool:
    """But for rounding; what is to be 0 must be exactly that."""
    if shown is None or expected is None:
        return shown is expected
    return close(shown, expected) and not np.any(shown[np.equal(expected, 0)])
