"""The parts of `cpsat_latency`: ticks, model, solver, search and symmetry."""
