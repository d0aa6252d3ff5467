"""How a PyTorch model's training step is written down as a Graph; `graph.capture` is the door."""
