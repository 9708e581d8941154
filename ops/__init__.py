"""Tools around the engine: benchmarks, replay, demo model. May import everything."""
