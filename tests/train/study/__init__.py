"""Studies as a whole: what they refuse, plan, resume, and read from loaders."""
