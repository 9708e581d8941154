"""What a stage may do to the log, and where the log is kept: in Redis or in memory."""
