"""The commits and reads of a stage, and where the log is kept: in Redis or in memory."""
