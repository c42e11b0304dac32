"""Compute the credit of saved rollouts with another algorithm and compare it with what was trained on."""
