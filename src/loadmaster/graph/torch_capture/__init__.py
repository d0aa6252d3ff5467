"""How a PyTorch model's training step is written down as a Graph: `record` watches ops run and keeps the
books, `paths` makes a step run in front of it. `graph.capture` is the door for people, `graph.export` the
one for the runtime; nobody outside of `graph` looks inside. It may import `core`, `modules` and
`graph.build`. [torch]
"""
