"""Rollouts as plain data, and the maths on them: merging, credit, filters, packing, the batch format."""
