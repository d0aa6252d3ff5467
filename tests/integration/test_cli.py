"""The verbs of the command line: their answers, their files, their exit codes.

What depends on the process runs in one; the rest calls the same `main` inside this one (the fixture `say`).
"""

import json
import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loadmaster as lm
from tests.integration.command_line import (
    Say,
    answer,
    ask,
    finish,
    start,
    write_graph,
)

GRAPHS = Path(__file__).resolve().parents[2].parent / "shared" / "graphs"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with plan.json and trace.json of a small chain, and what `plan --json` said."""
    folder = tmp_path_factory.mktemp("planned")
    said = answer(
        "plan", "gen:chain:10", "--budget", "200x", "--out", "plan.json", "--trace", "trace.json", cwd=folder
    )
    return folder, said


# ---- plan


def test_plan_prints_one_json_document_with_the_promised_fields(planned: tuple[Path, dict[str, Any]]) -> None:
    _, said = planned
    kinds: dict[str, type | tuple[type, ...]] = {
        "algorithm": str,
        "status": str,
        "step_s": float,
        "bound_s": float,
        "bound_name": str,
        "gap": float,
        "peak_bytes": list,
        "memory_bytes": list,
        "plan_s": float,
        "digest": str,
    }
    for field, kind in kinds.items():
        assert isinstance(said[field], kind), field
    assert said["algorithm"] == "auto"
    assert said["status"] == "feasible"
    assert said["gap"] == pytest.approx(said["step_s"] / said["bound_s"] - 1)
    assert len(said["peak_bytes"]) == len(said["memory_bytes"]) == len(said["devices"]) == 4
    assert all(peak <= memory for peak, memory in zip(said["peak_bytes"], said["memory_bytes"], strict=True))
    assert len(said["digest"]) == 64
    assert (said["plan"], said["trace"]) == ("plan.json", "trace.json")


def test_a_saved_plan_simulates_to_the_same_step_time(planned: tuple[Path, dict[str, Any]], say: Say) -> None:
    folder, said = planned
    again = ask(say, "simulate", str(folder / "plan.json"))
    assert again["step_s"] == said["step_s"]
    assert again["peak_bytes"] == said["peak_bytes"]
    assert again["fits"] is True
    code, out, _ = say("simulate", str(folder / "plan.json"), "--out", "line.json.gz", "--trace", "t.json")
    assert code == 0
    assert "timeline written to line.json.gz" in out
    timeline = lm.load("line.json.gz")
    assert isinstance(timeline, lm.Timeline)
    assert timeline.step_s == said["step_s"]
    assert Path("t.json").read_bytes() == (folder / "trace.json").read_bytes()


def test_a_saved_plan_can_be_shown_and_planned_again(planned: tuple[Path, dict[str, Any]], say: Say) -> None:
    folder, said = planned
    path = str(folder / "plan.json")
    shown = ask(say, "show", path)
    assert shown["placement"]["digest"] == said["digest"]
    assert shown["graph"]["num_ops"] == 10
    code, out, _ = say("show", path)
    assert code == 0
    for word in ("feasible", "above the best possible", "ref3", "10 (10 forward)", said["digest"][:16]):
        assert word in out
    assert ask(say, "plan", path, "--budget", "200x")["digest"] == said["digest"]


def test_the_trace_draws_every_op(planned: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = planned
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    ops = [event["name"] for event in events if event["ph"] == "X" and event["cat"] != "transfer"]
    assert sorted(ops) == [f"conv.{op}" for op in range(10)]


def test_the_same_count_gives_the_same_plan_in_every_process(tmp_path: Path) -> None:
    command = ["plan", "gen:fork_join:100", "--budget", "100x", "--seed", "3", "--json"]
    runs = [start(*command, cwd=tmp_path) for _ in range(2)]
    first, second = (json.loads(finish(run).stdout) for run in runs)
    assert first["digest"] == second["digest"]
    assert first["step_s"] == second["step_s"]


def test_where_nothing_fits_the_exit_code_is_1_and_the_reason_has_both_sizes(say: Say) -> None:
    command = ["plan", "gen:transformer:1500", "--devices", "RTX2080"]
    code, plain, _ = say(*command)
    json_code, machine, json_err = say(*command, "--json")
    reason = (
        r"gpu0 needs \d+\.\d GiB but has 7\.5 GiB \(\d+\.\d GiB short\): use a smaller batch, one more device"
    )
    assert code == json_code == 1
    assert re.search(reason, plain)
    assert "no plan that fits was found" in plain
    assert "the nearest plan:" in plain
    said = json.loads(machine)
    assert re.search(reason, said["reasons"][0])
    assert re.search(reason, json_err)
    assert said["status"] in ("not_found", "infeasible")
    assert said["step_s"] is None
    assert said["gap"] is None
    assert said["shortfall_bytes"][0] == said["peak_bytes"][0] - said["memory_bytes"][0] > 10**9


def test_a_plan_that_does_not_fit_can_be_saved_simulated_and_shown(say: Say) -> None:
    write_graph(Path("g.json"), {"id": "a", "time_ms": 1, "memory": 20e9})
    said = ask(say, "plan", "g.json", "-d", "T4", "--out", "p.json", code=1)
    assert said["status"] == "infeasible"
    assert said["proof"]
    assert ask(say, "simulate", "p.json")["fits"] is False
    assert "does not fit" in say("simulate", "p.json")[1]
    code, out, _ = say("show", "p.json")
    assert code == 0
    assert re.search(r"proven that no plan fits: .*18\.6 GiB.*14\.9 GiB", " ".join(out.split()))
    assert "more device" not in out  # which would not help


def test_an_algorithm_for_one_objective_is_asked_for_that_and_it_is_said(say: Say) -> None:
    code, out, err = say("plan", "gen:chain:8", "-d", "2xT4", "-a", "ideal_dp", "--budget", "20x")
    assert code == 0
    assert "ideal_dp supports only throughput, so that is the objective here, not step" in err
    assert "above the best of any chain" in out


@pytest.mark.slow
def test_a_proof_of_chains_speaks_of_chains_and_names_the_free_split(say: Say) -> None:
    """Each of three ops holds 9 GB; two devices of 16 GB take one each."""
    write_graph(Path("g.json"), *({"id": name, "time_ms": 1, "memory": 9e9} for name in "abc"))
    command = ("plan", "g.json", "-d", "2xT4", "--objective", "throughput", "--budget", "20x")
    code, out, _ = say(*command)
    assert code == 1
    assert "infeasible (no chain fits, proven)" in out
    assert "--split free" in out


def test_members_passed_over_alike_have_one_row(say: Say) -> None:
    code, out, _ = say("plan", "gen:chain:20", "-d", "2xT4", "--objective", "throughput", "--budget", "20x")
    assert code == 0
    assert out.count("makes free") == 1


def test_a_reserve_is_kept_free(say: Say) -> None:
    ops = [{"id": name, "time_ms": 1, "memory": 5e9} for name in "ab"]
    write_graph(Path("g.json"), *ops)
    free = ask(say, "plan", "g.json", "-d", "2xT4")
    assert free["memory_bytes"] == [16 * 10**9] * 2
    assert max(free["peak_bytes"]) <= 16 * 10**9
    tight = ask(say, "plan", "g.json", "-d", "2xT4", "--reserve", "8GB", "--budget", "20x")
    assert tight["memory_bytes"] == [8 * 10**9] * 2
    assert tight["peak_bytes"] == [5 * 10**9] * 2  # 10 GB would have fitted one device before
    none = ask(say, "plan", "g.json", "-d", "2xT4", "--reserve", "12GB", code=1)
    assert none["status"] == "infeasible"


def test_a_module_or_an_op_can_be_pinned(say: Say) -> None:
    command = ("plan", "gen:transformer:300", "-d", "2xA100-80GB", "--out", "p.json", "--budget", "20x")
    assert ask(say, *command, "--pin", "lm_head=gpu0", "--pin", "wpe.weight=gpu1")["status"] in (
        "feasible",
        "optimal",
    )
    placement = lm.load("p.json")
    assert isinstance(placement, lm.Placement)
    assert placement.plan is not None
    graph, device = placement.problem.graph, placement.plan.device
    head = np.array([module == "lm_head" or module.startswith("lm_head.") for module in graph.module])
    assert head.any()
    assert (device[head] == 0).all()
    assert device[graph.op_name.index("wpe.weight")] == 1


def test_a_format_can_be_forced_and_a_file_compressed(say: Say) -> None:
    write_graph(Path("g.json"), {"id": "a", "time_ms": 1})
    plain = ask(say, "plan", "g.json", "-d", "T4", "--format", "nodelink", "--out", "p.json.gz")
    assert Path("p.json.gz").read_bytes().startswith(b"\x1f\x8b")
    assert ask(say, "simulate", "p.json.gz")["step_s"] == plain["step_s"]
    assert say("plan", "g.json", "-d", "T4", "--out", os.devnull, "--trace", os.devnull)[0] == 0
    assert not os.path.isfile(os.devnull)


# ---- the other verbs


def test_compare_sets_all_algorithms_side_by_side_best_first(say: Say) -> None:
    names = {row["name"] for row in ask(say, "algorithms")["algorithms"]}
    assert {"auto", "single_device", "round_robin", "fastest_device", "chain_balance", "brute_force"} <= names
    for_pipelines = {"cpsat_throughput", "ideal_dp", "linear_dp", "local_search"}
    for_pipelines |= {"pipeline", "pipeline_equal", "pipeline_by_speed"}
    said = ask(say, "compare", "gen:chain:8", "--budget", "50x")
    assert {row["name"] for row in said["results"]} == names - for_pipelines
    assert all(row["status"] for row in said["results"])
    times = [row["step_s"] for row in said["results"] if row.get("step_s") is not None]
    assert times == sorted(times)
    code, out, _ = say("compare", "gen:chain:20", "--budget", "50x")
    assert code == 0
    assert "brute_force: supports at most 12 ops, not 20" in out
    assert "gap: above the lower bound of" in out


def test_compare_runs_the_chosen_algorithms_once_each(say: Say) -> None:
    command = ("compare", "gen:chain:8", "--algorithms", "round_robin, chain_balance,round_robin")
    assert sorted(row["name"] for row in ask(say, *command)["results"]) == ["chain_balance", "round_robin"]


def test_an_algorithm_for_steps_of_a_pipeline_needs_no_objective_beside_it(say: Say) -> None:
    words = (
        "gen:transformer:200",
        "--devices",
        "2xT4",
        "--pipeline",
        "1f1b:4",
        "--algorithm",
        "pipeline_equal",
    )
    code, out, err = say("plan", *words, "--json")
    assert code == 0, err
    assert json.loads(out)["objective"] == "step"


def test_compare_for_pipelines_leaves_out_what_is_made_for_steps_unless_it_is_named(say: Say) -> None:
    command = ("compare", "gen:chain:8", "--objective", "throughput", "--budget", "50x")
    names = {row["name"] for row in ask(say, *command)["results"]}
    assert {"auto", "chain_balance", "ideal_dp", "linear_dp"} <= names
    assert "cpsat_latency" not in names
    (named,) = ask(say, *command, "--algorithms", "cpsat_latency", code=1)["results"]
    assert "supports step, not throughput" in named["reason"]


def test_compare_ends_with_1_where_nothing_fits(say: Say) -> None:
    write_graph(Path("g.json"), {"id": "a", "time_ms": 1, "memory": 20e9})
    said = ask(say, "compare", "g.json", "-d", "T4", code=1)
    assert {row["status"] for row in said["results"]} == {"infeasible"}


def test_show_tells_a_graph_a_cluster_and_every_saved_noun(say: Say) -> None:
    shown = ask(say, "show", "gen:transformer:300", "--devices", "2xA100-80GB, cpu-64GB", "--ops", "2")
    assert [device["memory_bytes"] for device in shown["cluster"]["devices"]] == [80 * 10**9] * 2 + [
        64 * 10**9
    ]
    assert [op["name"] for op in shown["graph"]["ops"]] == ["wte.weight", "wpe.weight"]
    problem = lm.problem("gen:chain:4")
    placement = lm.plan(problem, algorithm="round_robin")
    assert placement.plan is not None
    nouns = (problem, problem.graph, problem.cluster, problem.costs, placement, placement.plan)
    for noun in (*nouns, lm.simulate(problem, placement.plan), lm.Budget(count=5)):
        lm.save(noun, "noun.json")
        kind = type(noun).__name__.lower()
        assert kind in ask(say, "show", "noun.json"), kind
        code, out, _ = say("show", "noun.json")
        assert code == 0
        assert "digest" in out or kind == "cluster"


def test_a_saved_plan_of_another_problem_is_refused(planned: tuple[Path, dict[str, Any]], say: Say) -> None:
    saved = json.loads((planned[0] / "plan.json").read_text())
    saved["digest"] = ""
    saved["content"]["plan"]["device"][0] = 2**31 - 2
    Path("p.json").write_text(json.dumps(saved))
    for verb in ("show", "simulate"):
        code, out, err = say(verb, "p.json")
        assert (code, out) == (2, "")
        assert err == "error: op 'conv.0' is on device 2147483646, the cluster has 4\n"


def test_doctor_tells_versions_devices_extras_and_cache(say: Say) -> None:
    code, plain, _ = say("doctor")
    assert code == 0
    found = ask(say, "doctor")
    assert found["versions"]["loadmaster"] == lm.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert set(found) == {"versions", "devices", "extras", "cache"}
    assert "cpu0" in found["devices"]
    assert found["extras"]["exact"] == f"ortools {version('ortools')}"
    for section in found.values():
        for name in section:
            assert name in plain


def test_the_demo_says_where_it_wrote_plan_and_trace(say: Say) -> None:
    code, out, _ = say("demo", "--out-dir", "a/b", "--budget", "20x", "--no-train")
    assert code == 0
    assert "plan written to a/b/demo-plan.json" in out
    assert "trace written to a/b/demo-trace.json" in out
    placement = lm.load("a/b/demo-plan.json")
    assert isinstance(placement, lm.Placement)
    assert placement.fits
    assert json.loads(Path("a/b/demo-trace.json").read_text())["traceEvents"]
    page = Path("a/b/demo-report.html")
    assert f"page written to {page.resolve()}" in out.splitlines()[-1]
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_help_is_there_for_every_verb_and_for_none(say: Say) -> None:
    code, out, err = say()
    assert (code, err) == (0, "")
    assert out == say("--help")[1]
    verbs = re.findall(r"^  (\w+)  +\S", out.partition("Commands:")[2], re.MULTILINE)
    known = [
        "plan",
        "fit",
        "ways",
        "run",
        "train",
        "report",
        "explain",
        "diff",
        "whatif",
        "export",
        "import",
        "simulate",
        "compare",
        "show",
        "probe",
        "algorithms",
        "demo",
        "doctor",
        "advise",
        "learn",
        "costs",
    ]
    assert verbs == known
    assert "..." not in out.partition("Commands:")[2]  # no summary is cut
    for verb in verbs:
        assert f"Usage: loadmaster {verb}" in say(verb, "--help")[1]
    assert say("--version")[1] == f"loadmaster {lm.__version__}\n"


# ---- public graphs


@pytest.mark.parametrize(
    "file",
    ["msr/throughput-inputs/LayerGraphs/bert24_training.json", "pipedream/vgg16.txt"],
)
def test_public_graphs_are_planned_on_their_own_devices(file: str, say: Say) -> None:
    if not (GRAPHS / file).exists():
        pytest.skip(f"{file} is not beside the repository")
    said = ask(say, "plan", str(GRAPHS / file), "--budget", "50x", "--out", "p.json")
    again = ask(say, "simulate", "p.json")
    throughput = file.startswith("msr")
    assert said["objective"] == again["objective"] == ("throughput" if throughput else "step")
    assert again["step_s"] == pytest.approx(said["step_s"], rel=1e-12)
    assert again["pass_s"] > again["step_s"] if throughput else again["pass_s"] == again["step_s"]
    assert said["samples_per_s"] == (1 / said["step_s"] if throughput else None)
    word = "time per sample" if throughput else "step time"
    assert word in say("simulate", "p.json")[1]
