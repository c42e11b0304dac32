"""Consistency checks of a run's journal: every draw counts once, and all other state is recomputed from the draws.

Works on any run directory, running or ended, from its files alone. The states of algorithms that learn only from
agents, rewards and their order (`Algorithm.replayable`) are replayed from the journal's credits: an audit compares them
with the saved states, and rescoring gives each group the state that it was credited with.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.algorithms.base import Algorithm, RolloutView
from headrace.errors import Failure
from headrace.rollout.types import Rollout, Sample, Task
from headrace.transport.journal import Journal
from headrace.transport.run_dir import RunDir


def find_violations(run: RunDir, journal: Journal) -> list[str]:
    """Return a sentence for every inconsistency; empty if the run is consistent."""
    return [*_check_draws(journal), *_check_steps(journal), *_check_files(run, journal)]


def _check_draws(journal: Journal) -> Iterator[str]:
    """Check that draw ids and the positions of each environment's draws are contiguous, and outcomes complete."""
    positions: Counter[str] = Counter()
    for expected, (draw, state, step, reason) in enumerate(journal.draws()):
        if draw.id != expected:
            yield f"draw {expected} is missing: the next one in the journal is {draw.id}"
            return
        if draw.position != positions[draw.env]:
            yield f"draw {draw.id} is at position {draw.position} of {draw.env}, not {positions[draw.env]}"
        positions[draw.env] += 1
        if state == "dropped" and not reason:
            yield f"draw {draw.id} was dropped without a reason"
        if state != "drawn" and step is None:
            yield f"draw {draw.id} is {state}, but has no step"


def _check_steps(journal: Journal) -> Iterator[str]:
    """Check that committed steps are contiguous and have draws, and that the draws sum to their totals."""
    committed = journal.totals_by_step()
    if list(committed) != list(range(1, len(committed) + 1)):
        yield f"the committed steps are {list(committed)}: one is missing"
    with_draws = {step or 0 for _, state, step, _ in journal.draws() if state in ("shipped", "trained")}
    for step in sorted(with_draws ^ committed.keys()):
        yield f"step {step} " + ("has no draw" if step in committed else "has draws, but was not committed")
    for step, totals in committed.items():
        if totals != (replayed := journal.totals(through=step)):
            yield f"the totals of step {step} are {totals}, but its draws sum to {replayed}"


def _check_files(run: RunDir, journal: Journal) -> Iterator[str]:
    """Compare the batches and checkpoints on disk with the journal."""
    recorded: dict[int, set[int]] = {}
    for draw, state, step, _ in journal.draws():
        if step is not None and state in ("shipped", "trained"):
            recorded.setdefault(step, set()).add(draw.id)
    for step in run.batches.steps():
        try:
            draws = set(run.batches.read(step).draw_ids)
        except FileNotFoundError:  # deleted meanwhile, since a checkpoint covers it
            continue
        except Failure as error:
            yield str(error)
            continue
        if draws != recorded.get(step, set()):
            yield f"{run.batches.path(step)} does not have the draws that the journal has for step {step}"
    for step in range(run.latest_checkpoint_step() + 1, journal.last_step() + 1):
        if not run.batches.is_committed(step) and step > run.latest_checkpoint_step():
            yield f"{run.batches.path(step)} is missing, and no checkpoint covers step {step}"
    covered, last = run.latest_checkpoint_step(), journal.last_step()
    if covered > last:
        yield f"there is a checkpoint of step {covered}, but the journal ends at step {last}"
    if (trained := journal.covered_step()) > covered:
        yield f"the steps through {trained} count as trained, but no checkpoint covers step {covered + 1}"


async def replay_states(journal: Journal, env: str, algorithm: Algorithm) -> dict[int, Any]:
    """Pass the credits of an environment to a new algorithm; return its state before each credit, by draw."""
    states = {}
    for draw, credited_env, rewards in journal.credits():
        if credited_env == env:
            states[draw] = _json_copy(algorithm.state())
            await _replay_credit(algorithm, env, rewards)
    return states


async def find_state_violations(journal: Journal, algorithms: Mapping[str, Algorithm]) -> list[str]:
    """Return a sentence for every saved state that differs from the replay; `algorithms` are new ones."""
    problems = []
    steps = {draw.id: step for draw, _, step, _ in journal.draws()}
    for env, saved in journal.states_by_step().items():
        credits = deque(credit for credit in journal.credits() if credit[1] == env)
        for step in sorted(saved) if env in algorithms else ():
            while credits and (steps[credits[0][0]] or 0) <= step:  # commits follow the order of credit
                await _replay_credit(algorithms[env], env, credits.popleft()[2])
            expected, state = _json_copy(algorithms[env].state()), saved[step].json
            if msgspec.json.decode(state) != expected:
                problems.append(
                    f"the algorithm of {env} has the state {state.decode()} in step {step}, but its credits give "
                    f"{expected}: unless its settings changed during the run, something is lost"
                )
    return problems


async def _replay_credit(algorithm: Algorithm, env: str, rewards: Sequence[tuple[str, float]]) -> None:
    """Credit a group of one-token rollouts with these agents and rewards."""
    one, task = np.ones(1), Task(env, {})
    rollouts = [
        Rollout(agent=agent, reward=reward, samples=[Sample(one, one, one, one, 0)]) for agent, reward in rewards
    ]
    await algorithm.score_group([RolloutView(rollout, task) for rollout in rollouts])


def _json_copy(state: Any) -> Any:
    """Return the state as it would be read from the journal."""
    return msgspec.json.decode(msgspec.json.encode(state))
