"""The tools of a pair's task: rollouts do not keep them, so the environment is asked again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.config.orchestrator import EnvConfig
from headrace.environments.base import Environment, tasks_of
from headrace.environments.registry import load_environment
from headrace.launch.prompt_lengths import NoModelCall, first_tools

Row = dict[str, Any]


def add_tools(rows: Sequence[Row], environments: Sequence[EnvConfig]) -> Iterator[str]:
    """Add `tools` to the pairs of tasks that have any; yield notices about environments that do not show theirs."""
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
            if any(_calls_tools(row) for row in own):
                yield f"pairs of {entry.name} have no tools: {error}"
            continue
        for row in own:
            if found := tools.get(row["task_key"]):
                row["tools"] = found


def _calls_tools(row: Row) -> bool:
    messages = [*row["prompt"], *row["chosen"], *row["rejected"]]
    return any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
