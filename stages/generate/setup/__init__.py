"""From flags, checkpoint and machine to an engine that is ready."""
