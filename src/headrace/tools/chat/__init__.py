"""Talking to a served model: what was said, the commands, the terminal, and how the server is found or started."""
