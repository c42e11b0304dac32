"""One file per algorithm: a finished rollout in, per-token credit out. Never imports torch."""
