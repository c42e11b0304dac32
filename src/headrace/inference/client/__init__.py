"""Clients of the engines of a run, and of other servers with OpenAI's API."""
