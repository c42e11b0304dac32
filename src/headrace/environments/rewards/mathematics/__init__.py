"""Mathematical answers: from LaTeX to tokens, from tokens to shapes, and whether two shapes are the same."""
