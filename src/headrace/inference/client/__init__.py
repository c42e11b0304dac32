"""Lines to servers: the engines of a run, and models that somebody else serves."""
