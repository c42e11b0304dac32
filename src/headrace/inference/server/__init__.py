"""The HTTP server in front of an engine."""
