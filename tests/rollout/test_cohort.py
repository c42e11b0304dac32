"""A group in numbers."""

import numpy as np

from headrace.rollout.credit import Cohort
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import ROLES, Rollout, Turn

USER, TOOL = ROLES.index("user"), ROLES.index("tool")


def turn(prompt: list[int], completion: list[int], roles: list[int] | None = None) -> Turn:
    return Turn(prompt, completion, [-1.0] * len(completion), [0] * len(completion), 1.0, prompt_roles=roles)


def rollout(reward: float, *turns: Turn) -> Rollout:
    return Rollout(reward=reward, turns=list(turns), samples=merge_turns(turns))


def test_what_was_written_and_what_was_given_is_counted_once():
    # The second prompt repeats the first turn and adds two tokens.
    cohort = Cohort.of(
        [rollout(1.0, turn([1, 2, 3], [4, 5]), turn([1, 2, 3, 4, 5, 6, 7], [8])), rollout(0.0, turn([1, 2, 3], [4]))]
    )
    assert cohort.rewards.tolist() == [1, 0]
    assert cohort.output_tokens.tolist() == [3, 1]
    assert cohort.context_tokens.tolist() == [5, 3]
    assert cohort.turns.tolist() == [2, 1]
    assert cohort.pass_rate == 0.5


def test_a_rewritten_history_is_given_once_more():
    # Nothing of the first sample is repeated by the second prompt: both prompts count.
    cohort = Cohort.of([rollout(1.0, turn([1, 2], [3]), turn([9, 9, 9], [4]))])
    assert cohort.context_tokens.tolist() == [5]
    assert cohort.output_tokens.tolist() == [2]


def test_tool_tokens_are_those_that_tools_wrote_after_the_first_response():
    first = turn([1, 2], [3], roles=[TOOL, USER])
    second = turn([1, 2, 3, 6, 7, 8, 9], [4], roles=[TOOL, USER, 0, 0, TOOL, TOOL, USER])
    assert Cohort.of([rollout(1.0, first, second)]).tool_tokens.tolist() == [2]


def test_without_roles_all_observations_are_tool_tokens():
    cohort = Cohort.of([rollout(1.0, turn([1, 2], [3]), turn([1, 2, 3, 6, 7, 8, 9], [4]))])
    assert cohort.tool_tokens.tolist() == [4]


def test_numbers_are_float64():
    cohort = Cohort.of([rollout(1, turn([1], [2]))])
    arrays = (cohort.rewards, cohort.output_tokens, cohort.context_tokens, cohort.tool_tokens, cohort.turns)
    assert {values.dtype for values in arrays} == {np.dtype(np.float64)}
