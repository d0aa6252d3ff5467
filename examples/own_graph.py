"""Build a graph op by op, describe a cluster in TOML, and see what a slow network costs."""

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
    for network in ("10gbit", "400gbit"):
        cluster = Path(folder) / "lab.toml"
        cluster.write_text(
            f"""
name = "lab"
inter = "{network}"
[[host]]
name = "box0"
devices = "RTX3090, cpu-64GB"
[[host]]
name = "box1"
devices = "RTX3090"
"""
        )
        placement = lm.plan(lm.problem(graph, cluster), budget="100x")
        assert placement.plan is not None
        print(f"{network:8} {placement.score_s:.3f} s, ops on {placement.plan.device.tolist()}")
