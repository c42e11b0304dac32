"""Groups of finished rollouts, for tests of algorithms."""

from collections.abc import Sequence

import numpy as np

from headrace.algorithms.base import RolloutView
from headrace.rollout.merge import merge_turns
from headrace.rollout.types import ROLES, Rollout, Task, Turn

TASK = Task("env", {"question": "?"}, "task-0")
TOOL = ROLES.index("tool")


def make_rollout(
    reward: float, length: int = 2, *, prompt: int = 1, turns: int = 1, tool_tokens: int = 0, roles_known: bool = True
) -> Rollout:
    """One sample: a prompt, then `turns` completions of `length` tokens in all, with tools' answers between them."""
    assert turns > 1 or not tool_tokens, "tools answer between two turns"
    context, roles, made = [0] * prompt, [0] * prompt, []
    for turn, sampled in enumerate(_split(length, turns)):
        if turn:
            answered = _split(tool_tokens, turns - 1)[turn - 1]
            context, roles = context + [7] * answered, roles + [TOOL] * answered
        completion = [1] * sampled
        made.append(
            Turn(context, completion, [-1.0] * sampled, [0] * sampled, 1.0, prompt_roles=roles if roles_known else None)
        )
        context, roles = context + completion, roles + [0] * sampled
    return Rollout(
        env=TASK.env, task_key=TASK.key, group_id="group-0", reward=reward, turns=made, samples=merge_turns(made)
    )


def make_group(
    rewards: Sequence[float],
    lengths: int | Sequence[int] = 2,
    *,
    prompts: int | Sequence[int] = 1,
    turns: int | Sequence[int] = 1,
    tool_tokens: int | Sequence[int] = 0,
    roles_known: bool = True,
    task: Task = TASK,
) -> list[RolloutView]:
    """A view for each reward; what is one number is the same for all of them."""
    sizes = [np.broadcast_to(given, len(rewards)).tolist() for given in (lengths, prompts, turns, tool_tokens)]
    return [
        RolloutView(make_rollout(r, n, prompt=p, turns=t, tool_tokens=k, roles_known=roles_known), task)
        for r, n, p, t, k in zip(rewards, *sizes, strict=True)
    ]


def advantages(group: Sequence[RolloutView]) -> list[float]:
    """The credit of each rollout's last token."""
    return [float(view.samples[-1].streams["advantages"][-1]) for view in group]


def _split(total: int, parts: int) -> list[int]:
    """As evenly as it goes, the last part being the largest."""
    return [total // parts] * (parts - 1) + [total - total // parts * (parts - 1)]
