"""Pipelines: a step of micro-batches, unrolled into a flat graph that the event loop runs.

The front door is `unrolled`; `stage_facts` says what the stages of a plan take and hold, `lowering` makes
the flat graph. The room may import `simulator.events`, `cost.transfer`, `graph.build` and `core`.
"""
