"""Pipelines: a model's graph cut into stages, and a rank's part of every step.

`stage_cut` says which stage runs each op and what crosses a cut, `stages` makes an `nn.Module` of each stage,
`executor` runs a rank's actions in the order of `core.pipelines.order`, `rank` is all that one process owns.
"""
