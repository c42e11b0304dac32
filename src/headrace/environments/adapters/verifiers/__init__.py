"""Tasksets of verifiers, run in this process: `id = "verifiers:NAME"`.

verifiers plays an episode through programs that it starts, servers that it asks over HTTP, and sandboxes. Here its own
environments, tasks, agents, hooks and scoring run as they are, and three things stand in for the rest: a harness that
is a loop in this process (`harness.py`), a way to the model that is the episode's own line, so that tokens stay exact
(`seat.py`), and toolsets that are called where they are (`toolsets.py`). What needs more than that is refused when it
is loaded (`loading.py`).

The library has no types, so its objects are `Any` here. It is imported by functions alone: it takes seconds.
"""

from headrace.environments.adapters.verifiers.environment import VerifiersTaskset

__all__ = ["VerifiersTaskset"]
