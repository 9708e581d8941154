"""Benchmarks: what they measure, against whom, and the checkpoints they run on."""
