"""Metrics: the definitions of all families, and the counts of one process."""
