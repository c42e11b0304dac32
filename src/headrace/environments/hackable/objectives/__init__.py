"""Objectives that ship: one file per objective, discovered by the registry."""
