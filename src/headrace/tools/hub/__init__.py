"""Runs, models and datasets to and from a repository on the Hugging Face hub."""
