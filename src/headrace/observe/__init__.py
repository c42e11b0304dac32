"""Observation of a run: metrics, process status, terminal view, summary, charts, monitors."""
