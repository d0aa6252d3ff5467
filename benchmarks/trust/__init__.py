"""Long runs that look for a wrong bound, a reader that crashes, a study that does not resume, or a leak."""
