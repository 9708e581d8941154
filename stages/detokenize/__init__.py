"""StepCompleted -> TokensProduced | Finished: incremental text, stop strings, the end of a request."""
