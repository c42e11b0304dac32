"""The embedded engine: continuous batching over an ordinary transformers model, in this process."""
