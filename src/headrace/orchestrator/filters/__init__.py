"""Filters, one per file: tests on one finished rollout that keep it out of training, or only count it."""
