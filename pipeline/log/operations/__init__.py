"""The operations on the log in Redis, by subject. A function here returns an operation, or takes several steps."""
