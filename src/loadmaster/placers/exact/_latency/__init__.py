"""The parts of `cpsat_latency`: ticks, model, solver, relaxation, published model."""
