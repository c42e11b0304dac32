"""The file with data, rewards and an objective: its sections, and how it becomes a run file."""
