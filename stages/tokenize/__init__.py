"""Submitted -> Tokenized | Failed: chat templates and encoding. Never torch."""
