"""The engine's loop: what it takes in, plans, commits, and knows of the past."""
