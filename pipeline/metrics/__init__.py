"""What is measured: every family of figures, and the counts of one process."""
