"""Strategies: groups of ops that are replicated, duplicated or placed, and gradients that meet.

`layout` says which ranks run what on which rows, `segments` cuts the model's graph where devices change,
`moves` says which rows go from whom to whom, `wire` sends and counts, `factors` and `gradients` make
gradients meet, `drift` finds copies that differ, `rank` is all that one process owns.
"""
