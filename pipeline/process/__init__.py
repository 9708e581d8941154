"""Processes: their parents, what they inherit, and how they log."""
