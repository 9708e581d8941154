"""The frontend: HTTP in, the log out, and back. Imports pipeline only, never torch or transformers."""
