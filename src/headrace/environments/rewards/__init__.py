"""Rewards: functions of what the model answered and the task's data. Never imports torch."""
