"""The operations on the log in Redis, by subject. Each function returns an operation, or takes several steps.

A function has the arguments of the log's method of the same name, and the log itself as the first.
"""
