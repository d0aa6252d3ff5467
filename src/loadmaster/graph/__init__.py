"""How a graph is made, read or rewritten."""
