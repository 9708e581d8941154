"""The log in the memory of one process: what the one in Redis is held against."""
