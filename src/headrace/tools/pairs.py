"""Preference pairs: within a group of rollouts, those with a high reward against those with a low one.

The best rollout is paired with the worst, the second best with the second worst, and so on: a rollout is in one pair at
most. Held-out pairs are those of some tasks, chosen by a hash of the task: a task stays on its side whatever steps are
read, so that files of several calls do not mix the two.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from headrace.config.orchestrator import EnvConfig
from headrace.environments.base import Environment, tasks_of
from headrace.environments.registry import load_environment
from headrace.launch.prompt_lengths import NoModelCall, first_tools
from headrace.text.training_examples import count_prompt_messages
from headrace.transport.rollout_files import RolloutFiles

COLUMNS = (
    *("step", "env", "task_key", "group_id", "episode", "agent", "trainable"),
    *("reward", "messages", "truncated", "error_reason"),
)
Row = dict[str, Any]


class Choice(NamedTuple):
    """Which pairs are made."""

    min_gap: float = 0.0
    """The least difference of two rewards; equal ones are never a pair."""
    per_group: int = 1
    """Pairs of a group, at most."""
    env: str | None = None
    """Only this environment."""


class Pairs(NamedTuple):
    rows: list[Row]
    """`prompt`, `chosen` and `rejected` as messages, with their rewards and where they are from."""
    groups: int
    rollouts: int
    left_out: Counter[str]
    """Rollouts, and pairs of a group, that were not used, by reason."""


def make_pairs(files: RolloutFiles, steps: Sequence[int], choice: Choice) -> Pairs:
    """Read the rollouts of these steps and pair them within their groups."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    left_out: Counter[str] = Counter()
    rollouts = 0
    for step in steps:
        for row in files.columns(step, COLUMNS):
            if choice.env is not None and row["env"] != choice.env:
                continue
            rollouts += 1
            failed = row["error_reason"] is not None or row["reward"] is None
            if failed or not row["trainable"]:
                left_out["failed" if failed else "not of the trained agent"] += 1
                continue
            row["messages"] = json.loads(row["messages"])
            groups.setdefault((row["env"], row["group_id"], row["task_key"], row["agent"]), []).append(row)
    rows = [pair for group in groups.values() for pair in _pairs_of(group, choice, left_out)]
    return Pairs(rows, len(groups), rollouts, left_out)


def _pairs_of(group: list[Row], choice: Choice, left_out: Counter[str]) -> Iterator[Row]:
    """Yield the pairs of one group, the largest difference of rewards first."""
    ranked = sorted(group, key=lambda row: (-row["reward"], row["truncated"], row["episode"]))
    # The end of an answer that was cut off is not the model's own, and must not be preferred.
    preferred = [row for row in ranked if not row["truncated"]]
    count = 0
    for chosen, rejected in zip(preferred, reversed(ranked), strict=False):
        gap = chosen["reward"] - rejected["reward"]
        if count == choice.per_group or gap <= 0 or gap < choice.min_gap:
            break
        context = count_prompt_messages(chosen["messages"], rejected["messages"])
        if context == 0 or chosen["messages"] == rejected["messages"]:
            left_out["pairs without a common prompt or a difference"] += 1
            continue
        count += 1
        yield {
            "prompt": chosen["messages"][:context],
            "chosen": chosen["messages"][context:],
            "rejected": rejected["messages"][context:],
            "chosen_reward": chosen["reward"],
            "rejected_reward": rejected["reward"],
            **{name: chosen[name] for name in ("env", "task_key", "group_id", "step")},
        }
    if not count:
        left_out["groups without a pair"] += 1


def is_held_out(row: Row, share: float) -> bool:
    """Return whether a pair is of a held-out task."""
    digest = hashlib.blake2b(f"{row['env']}/{row['task_key']}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64


def add_tools(rows: Sequence[Row], environments: Sequence[EnvConfig]) -> Iterator[str]:
    """Add `tools` to the pairs of tasks that have any; yield notices about environments that do not show theirs.

    Rollouts do not keep tools, so the environments are asked again.
    """
    for entry in environments:
        own = [row for row in rows if row["env"] == entry.name]
        keys = {row["task_key"] for row in own}
        try:
            environment = load_environment(entry.id, entry.args)
            if type(environment).start is not Environment.start:
                raise NoModelCall("its episodes may need start()")
            tasks = [task for task in tasks_of(environment, entry.name) if task.key in keys]
            tools = first_tools(environment, tasks)
        except NoModelCall as error:
            messages = [each for row in own for part in ("prompt", "chosen", "rejected") for each in row[part]]
            if any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
                yield f"pairs of {entry.name} have no tools: {error}"
            continue
        for row in own:
            if schemas := tools.get(row["task_key"]):
                row["tools"] = schemas
