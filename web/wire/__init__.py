"""Between the bodies of HTTP and the events of the log: pure functions, one package per protocol."""
