"""What travels between processes as files: batches to the trainer, weights to the engine."""
