"""Agents as they are: one written against OpenAI's client is pointed at a local address, and its calls are trained.

`proxy.py` answers at that address with the policy, `transcript.py` recognises what comes back, `program.py` is the
environment around it all.
"""

from headrace.environments.agents.environment import AgentEnvironment, Endpoint
from headrace.environments.agents.program import AgentProgram

__all__ = ["AgentEnvironment", "AgentProgram", "Endpoint"]
