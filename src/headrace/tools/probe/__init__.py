"""Probes of environments: run scripted completions through an environment and report problems before training."""
