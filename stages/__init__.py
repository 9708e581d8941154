"""The stages: each reads events from the log, folds them, and commits what follows. Imports pipeline only."""
