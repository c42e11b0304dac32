"""Sections of run files: field types, registries of alternatives, and their files."""
