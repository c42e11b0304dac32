"""Many runs from one file: which they are, how they are run side by side, and the report of what came of them."""
