"""Pure data and functions: what a rollout is, and everything that can be computed from one without I/O."""
