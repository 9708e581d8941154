"""What each worker of a stage does, whatever its stage: its process, its slot, what it cannot read."""
