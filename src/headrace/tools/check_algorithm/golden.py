"""Worked numbers: small groups whose credit was computed by hand from the definitions.

Each example has its own settings, independent of those of a run. Lengths are in tokens, `seq_len` is 1000.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.config.algorithms import ALGORITHMS, AlgorithmConfig
from headrace.rollout.types import Rollout, Task
from headrace.tools.check_algorithm.fixtures import (
    ANSWER,
    END,
    Author,
    Case,
    FakeModel,
    Fixtures,
    algorithm_config,
    bare_rollout,
)
from headrace.tools.check_algorithm.results import Verdict, close
from headrace.tools.check_algorithm.runner import HookFailed, Session, make_factory

MakeRollouts = Callable[[Fixtures], list[Rollout]]


class Golden(msgspec.Struct, frozen=True):
    """`expected` has per rollout: a value of the last token, a list for the sample or its completion, or None."""

    rollouts: MakeRollouts
    expected: list[Any]
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    stream: str = "advantages"
    model: Callable[[Fixtures], FakeModel] = lambda fixtures: FakeModel()


def _group(rewards: Sequence[float], lengths: Sequence[int] | int = 2, **more: Any) -> MakeRollouts:
    sizes = [lengths] * len(rewards) if isinstance(lengths, int) else lengths
    shapes = [{name: value[n] for name, value in more.items()} for n in range(len(rewards))]
    return lambda _: [bare_rollout(r, size, **shape) for r, size, shape in zip(rewards, sizes, shapes, strict=True)]


def _with(**penalty: Any) -> dict[str, Any]:
    return {"length_penalty": penalty}


_FOUR = _group([1, 1, 0, 0], [100, 200, 100, 200])
_GROUP_CREDIT = (
    Golden(_group([1, 0, 0, 0]), [0.75, -0.25, -0.25, -0.25]),
    Golden(_group([0.3] * 6), [0.0] * 6),
    # mean .5, standard deviation .5
    Golden(_group([1, 1, 0, 0]), [1, 1, -1, -1], {"normalize": "std"}),
    # B(r) = 100 / 400
    Golden(_group([1, 0], [100, 300]), [0.75, -0.25], {"length_weighted_baseline": True}),
    # p = .25 * .5 * tokens / 1000 = .0125, .025, .0125, .025; its mean .01875
    Golden(_FOUR, [0.50625, 0.49375, -0.49375, -0.50625], _with(type="linear")),
    # penalizes correct rollouts only: p = .0125, .025, 0, 0; its mean .009375
    Golden(_FOUR, [0.496875, 0.484375, -0.490625, -0.490625], _with(type="linear", gate_by_correctness=True)),
    # all correct: credit comes from the penalty alone. p = .025, .075
    Golden(_group([1, 1], [100, 300]), [0.025, -0.025], _with(type="linear")),
    # a negative pass rate would turn the penalty into a bonus
    Golden(_group([-1, 0], [100, 300]), [-0.5, 0.5], _with(type="linear")),
    # mean length of the correct rollouts is 20: r' = 1.5, 1, 0, 1; its mean .875
    Golden(_group([1, 1, 0, 1], [10, 30, 20, 20]), [0.625, 0.125, -0.875, 0.125], _with(type="tokens")),
    # r' = 1 + (1 - 2 / 3), 1, 0; its mean 7 / 9
    Golden(_group([1, 1, 0], 8, turns=[2, 4, 1]), [4 / 3 - 7 / 9, 1 - 7 / 9, -7 / 9], _with(type="turns")),
    # p = 0, .5, 1
    Golden(_group([1, 1, 1], [80, 90, 100]), [0.5, 0, -0.5], _with(type="overlong", max_tokens=100, cache_tokens=20)),
)


def _with_tool(fixtures: Fixtures) -> list[Rollout]:
    """Return two rollouts of 5 tokens: prompt 1, completion 1, tool 2, completion 1."""
    return [bare_rollout(reward, 2, turns=2, tool_tokens=2) for reward in (1, 0)]


def _distance_from_end(fixtures: Fixtures) -> FakeModel:
    """Return a model whose logprob of a token is minus its distance from the end, independent of the context."""
    return FakeModel(lambda ids: np.arange(-len(ids), 0, dtype=np.float64))


_CONTRAST = {"yes.": [-0.1, -1.0, -0.5], "no. ": [-0.1, -1.02, -1.0], "nay.": [-0.2, -0.98, -2.0]}
"""By hint: the teacher's logprobs of the three tokens of `ab`."""
_REWARD_OF_FOUR_TENTHS = 0.10955
"""x of the rewards x, 1, 0, 0 whose standardized credit is -.4: the smaller root of 8.52 x^2 - 5.68 x + .52 = 0."""


def _siblings(fixtures: Fixtures) -> list[Rollout]:
    author = Author(fixtures, 0)
    completions = (("ab", _REWARD_OF_FOUR_TENTHS), ("yes.", 1), ("no. ", 0), ("nay.", 0))
    return [author.answer(reward, text) for text, reward in completions]


def _contrasting(fixtures: Fixtures) -> FakeModel:
    def logprobs(ids: np.ndarray) -> np.ndarray:
        scores = np.full(len(ids), -1.0)
        text = fixtures.tokenizer.decode(ids.tolist())
        if text.endswith(f"ab{END}"):
            hint = next((hint for hint in _CONTRAST if hint in text), None)
            scores[-3:] = -1.0 if hint is None else _CONTRAST[hint]
        return scores

    return FakeModel(logprobs)


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
        Golden(_with_tool, [[0, 0, 0.1, 0.1, 0]] * 2, stream="ce_weights"),
        Golden(_with_tool, [[0, 0.5, 0.5, 0.5, 0.5], [0, -0.5, -0.5, -0.5, -0.5]]),
        Golden(_with_tool, [None, None], {"roles": {"user": {"alpha": 1.0}}}, stream="ce_weights"),
    ),
    "opd": (
        Golden(_group([1, 0], 2), [[-3, -2, -1]] * 2, stream="ref_logprobs", model=_distance_from_end),
        Golden(_group([1, 0], 2), [[0, 1, 1]] * 2, stream="ref_kl_weights"),
        Golden(_group([1, 0], 2), [[0, 0, 0]] * 2, stream="rl_weights"),
    ),
    "grpo_distill": (
        *_GROUP_CREDIT,
        Golden(_group([1, 0], 2), [[-3, -2, -1]] * 2, stream="ref_logprobs", model=_distance_from_end),
        Golden(_group([1, 0], 2), [[0, 0.5, 0.5]] * 2, {"ref_kl_weight": 0.5}, stream="ref_kl_weights"),
        Golden(_group([1, 0], 2), [None, None], stream="rl_weights"),
        Golden(_group([1, 0], 2), [[0, 2, 2]] * 2, {"rl_weight": 2.0}, stream="rl_weights"),
        # equal rewards: nothing for rl, and the teacher all the same
        Golden(_group([1, 1], 2), [[0, 0, 0]] * 2, stream="rl_weights"),
        Golden(_group([1, 1], 2), [[0, 1, 1]] * 2, stream="ref_kl_weights"),
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
        # No rollout is correct, so there is no contrast: mean .5, standard deviation .5
        Golden(_group([1, 1, 0, 0]), [1, 1, -1, -1], {"correct_threshold": 2.0}),
        # p = .0125, .025, .0125, .025 is centered at .01875 and not divided by the deviation
        Golden(_FOUR, [1.00625, 0.99375, -0.99375, -1.00625], {"correct_threshold": 2.0, **_with(type="linear")}),
        # e = .048751, -.0002, .879885, so only the second token is not modulated, and counts threefold
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
        # one proposer in each episode, without another to compare it with
        Golden(_PROPOSED, [0, 0.25, -0.75, 0, 0.25, 0.25], {"episode_agents": ["proposer"]}),
    ),
}


async def worked_numbers(config: AlgorithmConfig, fixtures: Fixtures) -> Verdict:
    """Compare the credit of a shipped algorithm with the numbers that were worked by hand."""
    worked = GOLDEN.get(config.type, ())
    if not worked:
        shipped = config.type in ALGORITHMS.names and config.type != "custom"
        missing = f"GOLDEN in tools/check_algorithm/golden.py has no {config.type}"
        return Verdict("does not apply", missing if shipped else "only shipped algorithms have worked numbers")
    for golden in worked:
        try:
            problem = await _problem(config.type, golden, fixtures)
        except HookFailed as failure:
            problem = str(failure)
        if problem:
            return Verdict("fails", problem)
    return Verdict("holds", str(len(worked)))


async def _problem(kind: str, golden: Golden, fixtures: Fixtures) -> str:
    """Run one example; return how its values differ from the expected ones, or an empty string."""
    config = algorithm_config({"type": kind, **golden.settings}, "worked numbers")
    model = golden.model(fixtures)
    rollouts = golden.rollouts(fixtures)
    for rollout in rollouts:
        rollout.env, rollout.group_id = "env", "group"
    async with Session.open(make_factory(config), model, fixtures.host(model)) as session:
        result = await session.credit(Case("worked numbers", Task("env", ANSWER, "task"), rollouts))
        await session.ship([result])
    for number, expected in enumerate(golden.expected):
        sample = result.credited.rollouts[number].samples[0]
        actual = sample.streams.get(golden.stream)
        if actual is None or expected is None:
            correct = actual is expected
        else:
            if not isinstance(expected, list):
                actual = actual[-1:]
            elif len(expected) != len(actual):
                actual = actual[sample.prompt_length :]
            # Values may differ by rounding, but an expected 0 must be exactly 0.
            correct = close(actual, expected) and not np.any(actual[np.equal(expected, 0)])
        if not correct:
            rewards = [rollout.reward for rollout in rollouts]
            values = None if actual is None else np.round(actual, 6).tolist()
            has = f"rollout {number} has {golden.stream} {values}, not {expected}"
            return f"rewards {rewards}, settings {golden.settings}: {has}"
    return ""
