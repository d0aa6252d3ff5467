"""One file per suite, each with `run(report)`."""
