"""Says when a run goes on with other tasks than it had: its draws are positions, and would point elsewhere unseen.

It is said, not refused: a data set may have been mended on purpose.
"""

from __future__ import annotations

from headrace.observe.status import Status
from headrace.orchestrator.signals import Kind
from headrace.orchestrator.wiring import Environments
from headrace.rollout.fingerprint import BY_POSITION, fingerprint
from headrace.transport.journal import Journal

CONSEQUENCES = {
    Kind.TRAIN: BY_POSITION,
    Kind.EVAL: "What is evaluated from here on cannot be compared with earlier results. If that is not meant, bring "
    "the old data back",
}


def tell_changed_tasks(environments: Environments, journal: Journal, status: Status) -> None:
    """Once for each change: the journal takes over the tasks of today."""
    for (kind, name), (_, _, tasks) in environments.items():
        now = fingerprint(task.data for task in tasks)
        before = journal.exchange_data(kind, name, now)
        if before is not None and (change := before.change_to(now)):
            status.notify(
                f"the tasks of the {kind} environment {name!r} have changed since the run last started: {change}. "
                f"{CONSEQUENCES[kind]}"
            )
