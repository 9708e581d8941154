"""Tokenized -> StepCompleted: the schedule, the KV cache and the forward pass."""
