"""Which rows run in the next step. Free of torch, clocks and random numbers: a pure fold."""
