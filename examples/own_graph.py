"""Build a graph op by op, describe a cluster in TOML, and compare two link models."""

import tempfile
from pathlib import Path

import loadmaster as lm
from loadmaster.graph.build import GraphBuilder

builder = GraphBuilder("two towers")
inputs = builder.op("inputs")
batch = builder.tensor(inputs, 64 * 2**20)
join = builder.op("join", flops=1e12)
for tower in ("left", "right"):
    op = builder.op(f"{tower} tower", flops=40e12, workspace_bytes=2**30)
    builder.use(batch, op)
    builder.use(builder.tensor(op, 256 * 2**20), join)
graph = builder.build()

with tempfile.TemporaryDirectory() as folder:
    cluster = Path(folder) / "lab.toml"
    cluster.write_text(
        """
name = "lab"
[[host]]
name = "box"
devices = "2xRTX3090, cpu-64GB"
"""
    )
    problem = lm.problem(graph, cluster)

placement = lm.plan(problem, budget="100x")
assert placement.plan is not None
for links in ("shared", "parallel"):
    timeline = lm.simulate(problem, placement.plan, links)
    print(f"{links:10} {timeline.step_s * 1e3:.1f} ms")
