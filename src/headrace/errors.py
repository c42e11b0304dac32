"""Errors that explain themselves: their message is complete, and the command line prints it without a traceback."""

from __future__ import annotations


class Failure(Exception):
    """Something went wrong at run time. The message names what, and what to do about it."""


class BadInput(Failure):
    """What was asked for cannot be done as asked; nothing has been started or changed."""
