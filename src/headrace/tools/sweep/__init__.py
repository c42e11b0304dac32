"""Many runs from one file: plan them, run them side by side, and report the results."""
