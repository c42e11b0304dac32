"""Evaluation of finished models: which are meant, their servers, their episodes, what these come to, and the report."""
