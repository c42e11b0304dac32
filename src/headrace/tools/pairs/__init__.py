"""Preference pairs from the rollouts of a run."""
