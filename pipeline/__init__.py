"""Events, the log that keeps them, and what feeds a stage. Imports nothing of ours, and never torch."""

VERSION = "0.2.0"
