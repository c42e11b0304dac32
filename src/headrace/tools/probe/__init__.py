"""What is right and wrong with an environment before anything is trained on it."""
