"""Tasksets of verifiers, run in this process: `id = "verifiers:NAME"`.

verifiers runs an episode through child programs, HTTP servers and sandboxes. Here its own environments, tasks, agents,
hooks and scoring run unchanged, and three things replace the rest: a harness that is a loop in this process
(`environment.py`), model calls through the episode's context, so that tokens stay exact, and toolsets that are called
in this process (both in `seat.py`). A taskset that needs more than that is refused when it is loaded.
The library is imported inside functions only: that takes seconds.
"""

from headrace.environments.adapters.verifiers.environment import VerifiersTaskset

__all__ = ["VerifiersTaskset"]
