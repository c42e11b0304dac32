"""Tools that work on runs from outside, one folder each; imported by `cli` alone."""
