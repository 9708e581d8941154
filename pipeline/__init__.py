"""What an event is, where it is kept, and how a stage is fed. Imports nothing of ours, and never torch."""

VERSION = "0.1.0"
