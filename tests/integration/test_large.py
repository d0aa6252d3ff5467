"""Graphs of a million ops: made, placed, simulated and saved."""

import pytest

import loadmaster as lm


@pytest.mark.slow
def test_a_million_op_transformer_is_planned_and_saved(tmp_path: object) -> None:
    problem = lm.problem("gen:transformer:1M", "16xref-1000TB")
    assert 990_000 < problem.graph.num_ops < 1_010_000
    placement = lm.plan(problem, algorithm="single_device", budget="1x")
    assert placement.score_s is not None
    path = f"{tmp_path}/plan.json.gz"
    lm.save(placement, path)
    again = lm.load(path)
    assert isinstance(again, lm.Placement)
    assert again.digest == placement.digest
