"""`plan` and `place` over a GPU and a CPU: what is on the CPU is counted with the CPU's kernels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="capture needs the extra [torch]")
import loadmaster as lm
from loadmaster.capacity.host_kernels import count_made_bytes
from loadmaster.capacity.mixed_plan import find_differing_ops, forbid_on_host, plan_with_own_kernels
from loadmaster.core.run import Budget

MODEL = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.made, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        parts = self.made(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*parts.unbind(0), dropout_p=0.1, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


def build():
    with torch.device("meta"):
        return nn.Sequential(*(Attention() for _ in range(3))), (torch.empty(4, 256, 64),)
"""
DEVICES = "RTX4090, cpu-64GB"


def source(folder: Path) -> str:
    (folder / "model.py").write_text(MODEL)
    return f"{folder / 'model.py'}:build"


def wrongly_counted(placement: lm.Placement, on_cpus: lm.Graph) -> list[str]:
    """Ops on a CPU that take other memory there than the plan says."""
    assert placement.plan is not None
    graph, cluster = placement.problem.graph, placement.problem.cluster
    known = dict(zip(on_cpus.op_name, count_made_bytes(on_cpus), strict=True))
    rows = zip(graph.op_name, count_made_bytes(graph), placement.plan.device.tolist(), strict=True)
    return [
        name
        for name, made, device in rows
        if cluster.on_host[cluster.kind[device]] and known.get(name) != made
    ]


def test_what_a_plan_has_on_a_cpu_is_counted_with_its_kernels(tmp_path: Path) -> None:
    on_cpus = lm.problem(source(tmp_path), "cpu-64GB").graph
    as_it_is = lm.plan(lm.problem(source(tmp_path), DEVICES), algorithm="round_robin", budget="2x")
    assert wrongly_counted(as_it_is, on_cpus)  # a Problem has one set of kernels
    found = lm.plan(source(tmp_path), DEVICES, algorithm="round_robin", budget="2x")
    assert wrongly_counted(found, on_cpus) == []


def test_a_model_that_a_gpu_cannot_hold_is_counted_as_the_cpu_runs_it(tmp_path: Path) -> None:
    on_cpus = lm.problem(source(tmp_path), "cpu-64GB").graph
    found = lm.plan(source(tmp_path), "RTX4090-2MB, cpu-64GB", budget="20x")
    assert wrongly_counted(found, on_cpus) == []
    assert found.peak_bytes[1] > 4 * 2 * 3 * 256 * 256 * 4  # attention is written out there


def test_a_plan_without_such_ops_on_a_cpu_keeps_its_proof(tmp_path: Path) -> None:
    found = lm.plan(source(tmp_path), DEVICES, algorithm="single_device", budget="2x")
    assert found.plan is not None
    assert "kernels of cuda" in found.problem.graph.capture


def test_ops_with_kernels_of_their_own_are_kept_off_cpus(tmp_path: Path) -> None:
    problem = lm.problem(source(tmp_path), DEVICES)
    other = lm.problem(source(tmp_path), DEVICES, target="cpu")
    differing = find_differing_ops(problem.graph, other.graph)
    names = {problem.graph.op_name[op] for op in np.flatnonzero(differing)}
    assert any("scaled_dot_product_attention" in name for name in names)
    assert not any(name.startswith("linear") and "backward" not in name for name in names)
    barred = forbid_on_host(problem, differing)
    assert barred is not None
    assert np.isinf(barred.device_compute_s[differing, 1]).all()
    assert np.isfinite(barred.device_compute_s[~differing]).all()
    some = np.flatnonzero(differing)[0]
    pinned = problem.pinned.copy()
    pinned[some] = 1
    assert forbid_on_host(replace(problem, pinned=pinned), differing) is None


def test_a_step_that_cannot_be_captured_for_cpus_is_kept_off_them(tmp_path: Path) -> None:
    problem = lm.problem(source(tmp_path), DEVICES)

    def refuse() -> lm.Problem:
        raise lm.LoadmasterError("no kernel")

    def ask(one: lm.Problem, budget: Budget) -> lm.Placement:
        return lm.plan(one, algorithm="round_robin", budget=budget)

    found = plan_with_own_kernels(problem, Budget(count=2), ask, refuse)
    assert found.plan is not None
    passes = np.isin(found.problem.graph.phase, (0, 1))
    assert (found.plan.device[passes] == 0).all()
