"""How `learned_order` is trained: problems are drawn, solved by the project's own solvers, and learned from.

`examples` draws problems and keeps their answers, `train` learns from them and writes checkpoints, `session`
does both and writes a curve and weights. May import what `placers.learned` may.
"""
