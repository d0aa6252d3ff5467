"""How far are fast heuristics from the proven optimum? On a published graph, or on a generated one.

usage: python exact_against_heuristic.py [GRAPH]     GRAPH: a file of the msr throughput inputs, for example
                                                     throughput-inputs/LayerGraphs/bert24_training.json
"""

import sys

import loadmaster as lm

if len(sys.argv) > 1:
    problem = lm.problem(sys.argv[1], objective="throughput")  # the file brings its own devices
else:
    problem = lm.problem("gen:transformer:300", "2xV100-16GB, T4-6GB", objective="throughput")

best = lm.plan(problem, algorithm="ideal_dp", budget="1000x")
print(f"{'ideal_dp':14} {best.score_s * 1e3:9.3f} ms  {best.status}")
for name in ("linear_dp", "chain_balance", "single_device"):
    placement = lm.plan(problem, algorithm=name, budget="1000x")
    score = "no plan fits" if placement.score_s is None else f"{placement.score_s * 1e3:9.3f} ms"
    above = "" if placement.score_s is None else f"  {placement.score_s / best.score_s - 1:6.1%} slower"
    print(f"{name:14} {score}{above}")
