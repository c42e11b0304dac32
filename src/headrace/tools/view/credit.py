"""The waterfall of a saved rollout: finds its group and its algorithm, whose terms explain the credit.

Nothing that the configuration imports is imported here: a user's terms, filters and algorithms are left out, and their
part of the credit is shown as what no term explains. An algorithm with a state gets it from the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import msgspec

import headrace.runfile.run  # noqa: F401  (registers the algorithms)
from headrace.algorithms.base import Algorithm, CreditTerm, MakeContext, RolloutView
from headrace.algorithms.kl import make_algorithm
from headrace.config.algorithms import ALGORITHMS
from headrace.errors import BadInput
from headrace.inference.client.reference import Reference
from headrace.orchestrator.audit import replay_states
from headrace.rollout.routing import gradient_shares
from headrace.rollout.types import Rollout, Task
from headrace.tools.view.rollouts import read_export, read_rollouts, read_saved, step_list, step_scale
from headrace.tools.view.runs import ViewedRun, cached
from headrace.tools.view.waterfall import component_shares, component_weights, explain, stream_summary
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RolloutKind

IMPORTS = ("terms", "filter", "hint_filter")
"""Keys of an algorithm's section that name code of the user."""
NEAR_STEPS = 8
"""Files before and after a step that are searched for the rest of a group."""
MAX_REPLAYED_DRAWS = 20_000
"""Draws of a journal that are replayed to know the state of an algorithm."""

_CONTEXT = MakeContext(1, lambda model: cast(Reference, None))  # terms of credit ask no model


def describe_credit(run: ViewedRun, step: int, row: int) -> dict[str, Any]:
    """Return the waterfall of a rollout, its streams and its loss components."""
    saved = read_saved(run, RolloutKind.TRAIN, step, row)
    rollout, notes = saved.rollout, []
    section, table = algorithm_section(run.settings(), rollout.env)
    group = read_group(run, step, rollout)
    terms: list[CreditTerm] = []
    if rollout.credited and len(group) != rollout.credited:
        notes.append(f"{len(group)} of {rollout.credited} rollouts of its group are on disk: no term can be computed.")
    elif rollout.credited or "advantages" in {name for sample in rollout.samples for name in sample.streams}:
        terms = _terms(run, rollout, group, table, section, notes)
    index = next((n for n, other in enumerate(group) if other.episode == rollout.episode
                  and other.agent == rollout.agent), 0)  # fmt: skip
    scale = None if saved.drop_reason else step_scale(run, step).components
    if saved.drop_reason:
        notes.append(f"It was not trained on ({saved.drop_reason}): it has no share of the gradient.")
    result = explain(rollout, index, terms, str(table.get("type", "grpo")), section, scale)
    shares = component_shares(rollout, scale) if scale else {}
    weights = component_weights(rollout)
    recorded = [values["share"] for values in read_export(run, step, row, rollout) if "share" in values]
    complete = len(recorded) == len(rollout.samples) and bool(recorded)
    return {
        "algorithm": table.get("type", "grpo"),
        "env": rollout.env,
        "group_size": len(group),
        "exact": bool(terms) and not any(table.get(key) for key in IMPORTS),
        "bars": result.bars,
        "unexplained": result.unexplained,
        "streams": stream_summary(rollout),
        "components": [
            {"name": name, "members": gradient_shares(rollout)[name].members, "weight": weights[name],
             "divisor": scale[name].members if scale else None, "share": share}
            for name, share in shares.items()
        ],
        "share": {
            "recorded": float(sum(values[values == values].sum() for values in recorded)) if complete else None,
            "estimate": sum(shares.values()) if shares else None,
        },
        "notes": notes,
    }  # fmt: skip


def algorithm_section(tree: dict[str, Any], env: str) -> tuple[str, dict[str, Any]]:
    """Return the key and the content of the section of an environment's algorithm."""
    orchestrator = tree.get("orchestrator", {})
    for number, entry in enumerate(orchestrator.get("train", {}).get("env", [])):
        if entry.get("name", entry.get("id")) == env and entry.get("algo"):
            return f"orchestrator.train.env.{number}.algo", entry["algo"]
    return "orchestrator.algo", orchestrator.get("algo", {})


def read_group(run: ViewedRun, step: int, rollout: Rollout) -> list[Rollout]:
    """Return the credited rollouts of a rollout's group by episode; dropped ones may be in files of other steps."""

    def steps() -> Iterator[int]:
        yield step
        near = [other for other in RolloutKind.TRAIN.files(run.dir.rollouts) if 0 < abs(other - step) <= NEAR_STEPS]
        yield from sorted(near, key=lambda other: abs(other - step))

    credited: list[Rollout] = []
    for other in steps():
        groups = {group["id"]: group["rows"] for group in step_list(run, RolloutKind.TRAIN, other)["groups"]}
        if rollout.group_id not in groups:
            continue
        rows = tuple(sorted(groups[rollout.group_id]))
        members = [read.rollout for read in read_rollouts(run, RolloutKind.TRAIN, other, rows).values()]
        credited += [member for member in members if member.error is None and member.trainable]
        if credited and len(credited) >= rollout.credited:
            break
    return sorted(credited, key=lambda member: member.episode)


def _terms(
    run: ViewedRun, rollout: Rollout, group: list[Rollout], table: dict[str, Any], section: str, notes: list[str]
) -> list[CreditTerm]:
    kind = str(table.get("type", "grpo"))
    if ":" in kind or kind == "custom":
        notes.append("The algorithm is code of the user, which is not run here: its credit is shown as recorded.")
        return []
    if left_out := [key for key in IMPORTS if table.get(key)]:
        notes.append(f"{section}.{left_out[0]} is code of the user, which is not run here: its part is not explained.")
    try:
        config = ALGORITHMS.section(kind).model_validate({k: v for k, v in table.items() if k not in IMPORTS})
        seq_len = int(run.settings().get("seq_len") or 1)
        algorithm = make_algorithm(config, msgspec.structs.replace(_CONTEXT, seq_len=seq_len))
    except (KeyError, ValueError, BadInput) as error:
        notes.append(f"{section} is not an algorithm of this version: {error}")
        return []
    if algorithm.keeps_state() and not _load_state(run, rollout, algorithm, config):
        notes.append("The state of the algorithm before this group is not known: its baseline begins at 0.")
    views = [RolloutView(member, Task(member.env, {}, member.task_key)) for member in group]
    return algorithm.credit_terms([algorithm.with_penalty(view) for view in views])


def _load_state(run: ViewedRun, rollout: Rollout, algorithm: Algorithm, config: Any) -> bool:
    """Give an algorithm the state before the credit of a rollout's draw; return whether the journal has it."""
    path = run.dir.journal
    if not algorithm.replayable or not path.is_file():
        return False

    def replay() -> dict[int, Any]:
        with closing(Journal(path, read_only=True)) as journal:
            if sum(journal.drawn_per_env().values()) > MAX_REPLAYED_DRAWS:
                return {}
            return asyncio.run(replay_states(journal, rollout.env, config.make(_CONTEXT)))

    states = cached(path, f"states of {rollout.env}", replay)
    if rollout.draw_id not in states:
        return False
    algorithm.load_state(msgspec.json.decode(msgspec.json.encode(states[rollout.draw_id])))
    return True
