"""Compare finished runs: what differs in their settings, curves and rewards, with confidence intervals."""
