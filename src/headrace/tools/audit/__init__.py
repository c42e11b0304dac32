"""Recompute what a run's files say from each other: journal, batches, rollouts, credit, states and draws."""
