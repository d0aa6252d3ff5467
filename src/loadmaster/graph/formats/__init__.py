"""One file per graph format: `recognises(data)`, `read(data, name)` and, where it makes sense, `write`."""
