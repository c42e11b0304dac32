"""`headrace replay`: a training step of a run again, compared with what the run recorded."""
