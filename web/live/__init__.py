"""What lives while requests run: the requests, the tail of the log, readiness, the janitor."""
