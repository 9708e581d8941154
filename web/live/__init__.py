"""What lives while requests run: their clients, the tail of the log that feeds them, readiness, the janitor."""
