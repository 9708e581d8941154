"""Processes: who starts them, what they have from their parent, and how they log."""
