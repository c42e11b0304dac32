"""Environment variables that a run file asks for: set here, they reach every process that is started from here."""

from __future__ import annotations

import os

from headrace.config.launch import LaunchConfig, without_exported


def set_variables(launch: LaunchConfig) -> list[str]:
    """Set the variables, before anything is imported that reads them. Returns notices for the user."""
    os.environ.update(without_exported(launch.env))
    notices = []
    for name, source in launch.env_from.items():
        if source in os.environ:
            os.environ[name] = os.environ[source]
        else:
            notices.append(f"launch.env_from: {name} shall be what {source} has, and there is no such variable here.")
    return notices
