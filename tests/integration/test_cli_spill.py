"""`loadmaster plan --spill`: a plan that keeps weights on the host, saved, simulated again, or refused."""

import json
from pathlib import Path

import loadmaster as lm
from loadmaster.graph.spill import LOAD
from loadmaster.graph.transformer import transformer
from tests.integration.command_line import Say


def test_plan_spills_to_the_host_and_the_file_says_so(tmp_path: Path, say: Say) -> None:
    graph, plan = str(tmp_path / "graph.json"), str(tmp_path / "plan.json")
    lm.save(transformer(num_layers=4, width=1600, num_heads=25, seq=128, batch=1, vocab=1000), graph)
    words = [
        "plan",
        graph,
        "--optimizer",
        "adamw",
        "--budget",
        "20x",
        "-d",
        "H200-1500MB, cpu-64GB",
        "--json",
    ]
    code, out, _ = say(*words, "--spill", "host", "-o", plan)
    assert code == 0
    said = json.loads(out)
    assert said["algorithm"] == "spill"
    assert LOAD in lm.load(plan).problem.graph.op_kind
    code, out, _ = say("simulate", plan, "--json")
    assert code == 0
    assert json.loads(out)["step_s"] == lm.load(plan).score_s


def test_a_place_that_is_none_is_refused(tmp_path: Path, say: Say) -> None:
    code, _, err = say("plan", "gen:transformer:100", "-d", "2xH200", "--budget", "5x", "--spill", "host")
    assert code == 2
    assert "needs host memory beside a device" in err
    code, _, err = say("plan", "gen:transformer:100", "-d", "H200, cpu", "--budget", "5x", "--spill", "disk")
    assert code == 2
    assert "device to spill to 'disk'" in err
