"""Pure functions between the bodies of HTTP and the events of the log, one package per protocol."""
