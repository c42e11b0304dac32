"""Packed batches in, new weights out. Knows neither orchestrator nor algorithms."""
