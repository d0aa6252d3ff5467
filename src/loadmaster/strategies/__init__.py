"""Strategies: for each group of ops which devices run it, on how many rows each, and how gradients meet.

`ask` is the front door: a problem answered with a strategy that a search found; `predict` makes an answer of
a given one. Rooms: `splitting` says which ops may be cut along the batch, `lowering` makes a flat graph and
plan of a strategy, `scoring` scores groups in less than a millisecond, `search` has one file for each search,
and `learned` the network that guides one. The room may import `questions`, `simulator`, `cost`, `graph` and
`core`; torch is used by `splitting.probe` and `learned` alone.
"""
