"""Echo: GRPO on what the policy wrote, cross-entropy on what it was answered (spec, "echo"; arXiv 2605.24517)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.algorithms.base import RolloutView
from headrace.algorithms.echo import Echo
from headrace.algorithms.group_credit import GroupCredit
from headrace.orchestrator.filters import has_no_advantage
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import ROLES, Message, Rollout, Task, Turn
from headrace.text.prompt import PromptRenderer
from tests.algorithms.groups import advantages, make_group
from tests.text.families import Said, load

SYSTEM, USER, ASSISTANT, TOOL = (ROLES.index(role) for role in ROLES[1:])
DEFAULT = {"tool": 0.1}
TASK = Task("env", {}, "task-0")


def echo(alphas: dict[str, float] = DEFAULT, keep: Any = None) -> Echo:
    return Echo(GroupCredit(), alphas, keep)  # type: ignore[arg-type]


def turn(prompt: Sequence[int], completion: Sequence[int], roles: Sequence[int] | None) -> Turn:
    nothing = [0.0] * len(completion)
    return Turn(list(prompt), list(completion), nothing, nothing, 1.0, prompt_roles=roles)


def conversation() -> RolloutView:
    """A user asks (2 tokens), a tool answers (2 and the chat format's own), a user and a system go on."""
    first = turn([1, 2], [3], [USER, USER])
    second = turn([1, 2, 3, 4, 5, 6], [7], [USER, USER, ASSISTANT, 0, TOOL, TOOL])
    third = turn(
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        [11, 12],
        [USER, USER, ASSISTANT, 0, TOOL, TOOL, ASSISTANT, USER, SYSTEM, ASSISTANT],
    )
    turns = [first, second, third]
    return RolloutView(Rollout(turns=turns, samples=merge_turns(turns), reward=1.0), TASK)


async def weights(algorithm: Echo, view: RolloutView | None = None) -> list[float] | None:
    view = view or conversation()
    await algorithm.score_rollout(view)
    [sample] = view.samples
    stream = sample.streams.get("ce_weights")
    return None if stream is None else stream.tolist()


async def test_the_tools_answers_after_the_first_response_are_trained_with_their_alpha():
    assert await weights(echo()) == pytest.approx([0, 0, 0, 0, 0.1, 0.1, 0, 0, 0, 0, 0, 0])


async def test_each_role_has_its_own_alpha():
    alphas = {"user": 0.5, "system": 2.0, "assistant": 0.25}
    assert await weights(echo(alphas)) == [0, 0, 0, 0, 0, 0, 0, 0.5, 2.0, 0.25, 0, 0]


async def test_what_the_policy_sampled_is_never_selected():
    [sample] = conversation().samples
    selected = await weights(echo(dict.fromkeys(("system", "user", "assistant", "tool"), 1.0)))
    assert selected is not None
    assert not np.any(np.array(selected)[sample.mask])


async def test_a_sample_where_nothing_is_selected_ships_no_stream():
    turns = [turn([1], [2], [USER]), turn([1, 2, 3], [4], [USER, ASSISTANT, USER])]
    view = RolloutView(Rollout(turns=turns, samples=merge_turns(turns)), TASK)
    assert await weights(echo(), view) is None


async def test_only_the_samples_with_observations_have_a_stream():
    turns = [turn([1], [2], [USER]), turn([50], [51], [USER]), turn([1, 2, 3], [4], [USER, ASSISTANT, TOOL])]
    view = RolloutView(Rollout(turns=turns, samples=merge_turns(turns)), TASK)
    await echo().score_rollout(view)
    assert ["ce_weights" in sample.streams for sample in view.samples] == [True, False]


async def test_a_filter_narrows_by_a_mask_for_each_turn():
    def keep(rollout: Rollout) -> list[Any]:
        assert len(rollout.turns) == 3
        return [None, [True, True, True, True, True, False], None]

    assert await weights(echo(keep=keep)) == pytest.approx([0, 0, 0, 0, 0.1, 0, 0, 0, 0, 0, 0, 0])


async def test_a_filter_can_only_narrow():
    everything = lambda rollout: [np.ones(len(turn.prompt_ids), bool) for turn in rollout.turns]  # noqa: E731
    assert await weights(echo(keep=everything)) == await weights(echo())


async def test_a_filter_that_keeps_nothing_ships_no_stream():
    nothing = lambda rollout: [np.zeros(len(turn.prompt_ids), bool) for turn in rollout.turns]  # noqa: E731
    assert await weights(echo(keep=nothing)) is None


def two_masks(rollout: Rollout) -> list[Any]:
    return [None, None]


def no_masks(rollout: Rollout) -> None:
    pass


def short_mask(rollout: Rollout) -> list[Any]:
    return [None, [True] * 5, None]


@pytest.mark.parametrize(
    ("keep", "complaint"),
    [
        (no_masks, "no_masks.*NoneType"),
        (two_masks, r"two_masks.*\b2\b.*\b3\b"),
        (short_mask, r"short_mask.*\(5,\).*turn 1\b.*\b6\b"),
    ],
)
async def test_a_filter_of_the_wrong_shape_is_named(keep: Any, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        await weights(echo(keep=keep))


async def test_where_the_renderer_cannot_tell_it_says_which_one_to_use():
    [view] = make_group([1.0], 4, turns=2, tool_tokens=2, roles_known=False)
    with pytest.raises(ValueError, match=r"orchestrator\.renderer\.name"):
        await echo().score_rollout(view)


async def test_one_turn_needs_no_renderer_that_can_tell():
    [view] = make_group([1.0], 4, roles_known=False)
    assert await weights(echo(), view) is None


async def credited(rewards: list[float], **shape: Any) -> list[RolloutView]:
    group = make_group(rewards, 4, **shape)
    algorithm = echo()
    for view in group:
        await algorithm.score_rollout(view)
    await algorithm.score_group(group)
    return group


async def test_actions_have_the_credit_of_the_group():
    group = await credited([1, 0, 0, 0], turns=2, tool_tokens=3)
    assert advantages(group) == [0.75, -0.25, -0.25, -0.25]
    assert all(set(view.samples[0].streams) == {"advantages", "ce_weights"} for view in group)


async def test_a_rollout_without_credit_learns_from_its_observations_alone():
    group = await credited([1, 1], turns=2, tool_tokens=3)
    for view in group:
        [sample] = view.samples
        assert sample.streams["rl_weights"].tolist() == [0] * len(sample)
        assert np.count_nonzero(sample.streams["ce_weights"]) == 3
        assert not has_no_advantage(view.rollout)


async def test_one_that_observed_nothing_either_has_nothing_to_learn():
    for view in await credited([1, 1]):
        assert set(view.samples[0].streams) == {"advantages"}
        assert has_no_advantage(view.rollout)


async def test_of_a_group_only_those_without_credit_leave_rl():
    group = await credited([1, 0.5, 0], turns=2, tool_tokens=3)
    assert ["rl_weights" in view.samples[0].streams for view in group] == [False, True, False]


def said(model: Any, messages: list[Message], replies: Sequence[str]) -> list[Turn]:
    """The turns of a conversation in which the policy gives these replies, as they would be recorded."""
    prompts, turns = PromptRenderer(model.renderer), []
    for message, reply in zip(messages, replies, strict=True):
        prompt = prompts.extend(turns[-1], [message], []) if turns else prompts.render([message], [])
        assert prompt is not None and prompt.roles is not None
        turns.append(turn(prompt.ids, model.written(Said(reply)), prompt.roles.tolist()))
    return turns


@pytest.mark.parametrize("name", ["qwen3-all", "llama-3", "kimi-k2"])
async def test_in_a_real_chat_format_the_body_of_a_message_is_selected_and_nothing_around_it(name: str):
    model = load(name)
    messages = [
        {"role": "user", "content": "What is the time?"},
        {"role": "user", "content": "Answer the cat and the dog."},
        {"role": "user", "content": "And the owl."},
    ]
    turns = said(model, messages, ["What cat?", "I see.", "Done."])
    view = RolloutView(Rollout(turns=turns, samples=merge_turns(turns)), TASK)
    await echo({"user": 0.5}).score_rollout(view)
    [sample] = view.samples
    selected = model.decode(sample.token_ids[sample.streams["ce_weights"] == 0.5].tolist())
    assert selected == "Answer the cat and the dog.And the owl."
