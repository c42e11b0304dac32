"""Whether a run's journal adds up: every draw accounted for once, and everything else a fold over the draws.

Works on any run directory, running or ended, and needs nothing but its files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from headrace.transport.journal import Journal
from headrace.transport.run_dir import RunDir


def violations(run: RunDir, journal: Journal) -> list[str]:
    """A sentence for everything that should not be; none if the run adds up."""
    return [*_draws(journal), *_steps(journal), *_batches(run, journal), *_checkpoints(run, journal)]


def _draws(journal: Journal) -> Iterator[str]:
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
            yield f"draw {draw.id} is {state}, but in no step"


def _steps(journal: Journal) -> Iterator[str]:
    committed = journal.totals_at()
    if list(committed) != list(range(1, len(committed) + 1)):
        yield f"the committed steps are {list(committed)}: one is missing"
    carried = {step or 0 for _, state, step, _ in journal.draws() if state in ("shipped", "trained")}
    for step in sorted(carried ^ committed.keys()):
        yield f"step {step} " + ("carries no draw" if step in committed else "carries draws, but was not committed")
    for step, totals in committed.items():
        if totals != (replayed := journal.totals(through=step)):
            yield f"the totals of step {step} are {totals}, but its draws sum to {replayed}"


def _batches(run: RunDir, journal: Journal) -> Iterator[str]:
    """The batches that are still on disk carry exactly the draws that the journal has for them."""
    recorded: dict[int, set[int]] = {}
    for draw, state, step, _ in journal.draws():
        if step is not None and state in ("shipped", "trained"):
            recorded.setdefault(step, set()).add(draw.id)
    for step in run.batches.steps():
        if set(run.batches.read(step).draw_ids) != recorded.get(step, set()):
            yield f"{run.batches.path(step)} does not carry the draws that the journal has for step {step}"


def _checkpoints(run: RunDir, journal: Journal) -> Iterator[str]:
    covered, last = run.latest_checkpoint_step(), journal.last_step()
    if covered > last:
        yield f"there is a checkpoint of step {covered}, but the journal ends at step {last}"
    for draw, state, step, _ in journal.draws():
        if state == "trained" and (step or 0) > covered:
            yield f"draw {draw.id} counts as trained in step {step}, which no checkpoint covers"


def report(states: dict[str, int], problems: Sequence[str]) -> str:
    """For people."""
    lines = [f"{count:8d} {state.replace(':', ': ')}" for state, count in sorted(states.items())]
    verdict = "everything adds up" if not problems else f"{len(problems)} problems:"
    return "\n".join([*lines, verdict, *(f"  {problem}" for problem in problems)])
