"""Tasks, episodes and rewards. Never imports torch."""
