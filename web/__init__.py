"""The frontend: turns HTTP requests into events of the log, and events into answers. Imports pipeline only."""
