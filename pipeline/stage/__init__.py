"""The common part of all stages' workers: the process, its slot, and entries that it cannot read."""
