"""Which ops may be cut along the batch: rows followed through a captured graph.

`splits` is the front door: every tensor gets a form (`forms`), by `rules` and then by `probe` (torch).
`units` are ops that must stay together. The room may import `cost`, `core` and, in `probe`, torch.
"""
