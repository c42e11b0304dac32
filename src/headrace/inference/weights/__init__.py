"""Published weights into an engine: out of files, or out of the memory of the trainer."""
