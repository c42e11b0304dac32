"""Length penalties, one per file: terms of a group's credit, each added to the reward before it is centered."""
