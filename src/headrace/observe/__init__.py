"""Observation of a run: metrics, process status, diagnosis, terminal view, summary, charts, monitors."""
