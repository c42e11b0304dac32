"""Headrace: asynchronous reinforcement learning and distillation for language models."""

__version__ = "0.1.0"
