"""How a graph is made, read or rewritten: captured from a model, read from a file, generated, coarsened.
`source.read_source` is the front door. It may import `modules`, `zoo` and `core`, but not `cluster`.
"""
