"""Training of existing agents: an agent that uses OpenAI's client gets a local URL, and its calls are trained.

`proxy.py` serves the policy at that URL, `episode.py` recognizes replies that are sent back, `program.py` is the
environment for run files.
"""

from headrace.environments.agents.program import AgentEnvironment, AgentProgram, Endpoint

__all__ = ["AgentEnvironment", "AgentProgram", "Endpoint"]
