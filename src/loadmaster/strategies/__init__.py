"""Strategies: for each group of ops which devices run it, on how many rows each, and how gradients meet.

`ask` is the front door: a problem answered with a strategy that a search found. `splits` says which ops may
be cut along the batch: by `rules`, then by `probe`. `units` says which ops must stay together. `evaluator`
scores groups in less than a millisecond; `lowering` makes a flat graph and plan of a strategy, so that
simulator, bounds, checks, traces and reports serve it unchanged. Searches are in `search/`. The room may
import `questions`, `simulator`, `cost`, `graph` and `core`; torch is used by `probe` alone.
"""
