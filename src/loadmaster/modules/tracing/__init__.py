"""What the Python of a forward reads and sets, for whoever runs it once and takes what it did for a graph.

`python_reads` finds every value that its code can reach, `torch_settings` what it sets of torch's own state.
May import core and other rooms of `modules`.
"""
