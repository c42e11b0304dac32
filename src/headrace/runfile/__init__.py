"""The typed run file: reads, merges, checks, explains and writes it."""
