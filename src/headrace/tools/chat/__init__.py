"""Chat in the terminal with a served model."""
