"""Who wrote what stands between completions."""

from headrace.rollout.merge import merge_turns, observed_roles
from headrace.rollout.types import ROLES, Turn

SYSTEM, USER, ASSISTANT, TOOL = (ROLES.index(role) for role in ROLES[1:])


def turn(prompt: list[int], completion: list[int], roles: list[int] | None) -> Turn:
    return Turn(prompt, completion, [-1.0] * len(completion), [0] * len(completion), 1.0, prompt_roles=roles)


def test_only_what_follows_the_first_response_has_a_role():
    first = turn([1, 2, 3], [4, 5], [0, SYSTEM, USER])
    second = turn([1, 2, 3, 4, 5, 6, 7, 8], [9], [0, SYSTEM, USER, ASSISTANT, ASSISTANT, 0, TOOL, 0])
    [sample] = merge_turns([first, second])
    roles = observed_roles(sample, [first, second])
    assert roles is not None
    assert roles.tolist() == [0, 0, 0, 0, 0, 0, TOOL, 0, 0]


def test_each_observation_is_read_from_the_prompt_of_its_own_turn():
    turns = [
        turn([1], [2], [USER]),
        turn([1, 2, 3], [4], [USER, ASSISTANT, TOOL]),
        turn([1, 2, 3, 4, 5, 6], [7], [USER, ASSISTANT, USER, ASSISTANT, 0, USER]),  # it has another view of token 3
    ]
    [sample] = merge_turns(turns)
    roles = observed_roles(sample, turns)
    assert roles is not None
    assert roles.tolist() == [0, 0, TOOL, 0, 0, USER, 0]


def test_interleaved_agents_have_their_own_observations():
    turns = [
        turn([1], [2], [USER]),
        turn([50], [51], [USER]),
        turn([1, 2, 3], [4], [USER, ASSISTANT, TOOL]),
        turn([50, 51, 52], [53], [USER, ASSISTANT, SYSTEM]),
    ]
    found = [observed_roles(sample, turns) for sample in merge_turns(turns)]
    assert [roles.tolist() for roles in found if roles is not None] == [[0, 0, TOOL, 0], [0, 0, SYSTEM, 0]]


def test_a_cut_sample_keeps_the_roles_that_it_still_has():
    turns = [turn([1], [2], [USER]), turn([1, 2, 3, 4, 5], [6], [USER, ASSISTANT, TOOL, TOOL, USER])]
    [sample] = merge_turns(turns)
    for length, expected in ((4, [0, 0, TOOL, TOOL]), (3, [0, 0, TOOL]), (2, [0, 0]), (1, [0])):
        roles = observed_roles(sample.truncated(length), turns)
        assert roles is not None and roles.tolist() == expected


def test_a_renderer_that_cannot_tell_makes_them_unknown():
    turns = [turn([1], [2], [USER]), turn([1, 2, 3], [4], None)]
    [sample] = merge_turns(turns)
    assert observed_roles(sample, turns) is None


def test_without_observations_nothing_is_unknown():
    turns = [turn([1], [2, 3], None)]
    [sample] = merge_turns(turns)
    roles = observed_roles(sample, turns)
    assert roles is not None and roles.tolist() == [0, 0, 0]
