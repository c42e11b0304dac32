"""Conformance checks of algorithms: worked numbers and invariants, for shipped algorithms and users' own.

All checks run in memory in a second or two: no model is loaded and no request is sent. They do not tell whether an
algorithm learns; only a run does.
"""
