"""Schedules episodes, assigns credit and ships batches. Never imports torch."""
