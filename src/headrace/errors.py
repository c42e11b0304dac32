"""Errors that explain themselves: their message is complete, and the command line prints it without a traceback."""

from __future__ import annotations

import os

AGAIN = os.EX_TEMPFAIL
"""The exit status (75) of a process that can go on if it is started again: the engine under a server died."""


class Failure(Exception):
    """Something went wrong at run time. The message names what, and what to do about it."""


class BadInput(Failure):
    """What was asked for cannot be done as asked; nothing has been started or changed."""
