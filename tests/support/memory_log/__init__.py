"""The log in the memory of one process. Tests compare the one in Redis with it."""
