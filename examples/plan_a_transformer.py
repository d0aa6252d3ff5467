"""Plan a training step on unequal devices, look at the answer, and save it."""

import tempfile
from pathlib import Path

import loadmaster as lm

problem = lm.problem("gen:transformer:1500", devices="V100-16GB, T4, RTX2080, cpu-64GB")
placement = lm.plan(problem, budget="200x")
assert placement.plan is not None, placement.proof

print(f"status      {placement.status}")
print(f"step time   {placement.score_s:.3f} s, at most {placement.gap:.0%} above the best possible")
for name, peak in zip(problem.cluster.device_name, placement.peak_bytes, strict=True):
    print(f"{name:11} {peak / 2**30:5.1f} GiB at its peak")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "plan.json"
    lm.save(placement, path)
    again = lm.load(path)
assert isinstance(again, lm.Placement)
assert again.digest == placement.digest
