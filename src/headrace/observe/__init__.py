"""What a run shows of itself: metrics, process status, terminal view, summary, plots."""
