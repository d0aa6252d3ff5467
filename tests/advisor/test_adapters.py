"""Adapters replay recorded JSON; the log is joined with outcomes; Ray runs for real."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadmaster.advisor.adapters.kubernetes import advise_kubernetes
from loadmaster.advisor.adapters.log import AdviceEntry, OutcomeEntry, append_entry, read_log, score_log
from loadmaster.advisor.adapters.slurm import advise_slurm
from loadmaster.advisor.jobs.curve import measured_curve
from loadmaster.core.errors import FormatError

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
def test_a_recorded_queue_gives_the_recorded_advice(say, tmp_path: Path, scheduler: str) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "advice.jsonl"
    queue = GOLDEN / f"{scheduler}_queue.json"
    before = queue.read_bytes()
    code, out, _ = say("advise", "shadow", scheduler, "--queue", str(queue), "--log", str(log))
    assert code == 0
    assert out == (GOLDEN / f"{scheduler}_advice.txt").read_text()
    assert queue.read_bytes() == before
    entries, _ = read_log(log)
    assert [type(e) for e in entries] == [AdviceEntry] * len(entries)
    assert entries


def test_score_joins_advice_and_outcomes() -> None:
    advice = [
        AdviceEntry(str(i), "slurm", True, 8, 4, "fits", 200.0, 100.0, 90.0, 110.0, 0.9) for i in range(10)
    ]
    outcomes = [OutcomeEntry(str(i), 4 if i < 8 else 8, 100.0 + 2 * i) for i in range(10)]
    found = score_log([*advice, *outcomes, OutcomeEntry("unknown", 1, 5.0)])
    assert (found.advised, found.finished, found.met) == (10, 10, 10)
    assert found.agreement == 0.8
    assert found.coverage == 6 / 8
    assert not found.ready_to_act
    assert found.promised == pytest.approx(9.0)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        '{"kind": "advice"}',
        '{"kind": "outcome", "job": 1, "devices": 0, "finish_s": 1}',
        '{"kind": "advice", "job": [1], "scheduler": "s", "admit": true, "requested": 1,'
        ' "advised": 1, "reason": ""}',
        '{"kind": "advice", "job": "1", "scheduler": "s", "admit": true, "requested": 1,'
        ' "advised": "1", "reason": ""}',
    ],
)
def test_a_malformed_log_line_is_told_with_its_number(tmp_path: Path, line: str) -> None:
    log = tmp_path / "log"
    append_entry(log, AdviceEntry("1", "slurm", False, 1, 0, "no"))
    with log.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(FormatError, match="line 2"):
        read_log(log)
    entries, skipped = read_log(log, skip_malformed=True)
    assert len(entries) == 1
    assert skipped[0].startswith("line 2")


def test_gpus_spread_unevenly_over_nodes_are_asked_for_the_whole_job() -> None:
    nodes = [
        {"name": "n", "gres": "gpu:a100:4", "gres_used": "gpu:a100:2"},
        {"name": "m", "gres": "gpu:a100:2", "gres_used": "gpu:a100:1"},
    ]
    job = {"job_id": 5, "name": "j", "job_state": ["PENDING"], "tres_req_str": "gres/gpu=3"}
    found = advise_slurm({"nodes": nodes, "jobs": [job], "now": 0, "curves": {"j": {"3": 100}}})
    assert found[0].action == "scontrol update JobId=5 NumNodes=2 TresPerJob=gres/gpu:3"


@pytest.mark.parametrize("now", [{}, {"now": "soon"}, {"now": True}])
def test_a_queue_of_no_known_time_is_refused(now: dict[str, object]) -> None:
    nodes = [{"name": "n", "gres": "gpu:a100:4"}]
    with pytest.raises(FormatError, match="seconds since 1970"):
        advise_slurm({"nodes": nodes, "jobs": []} | now)


@pytest.mark.parametrize(
    "document",
    [
        {"nodes": [{"metadata": {"name": "a"}, "status": {"allocatable": {"nvidia.com/gpu": "two"}}}]},
        {
            "nodes": [{"metadata": {"name": "a"}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}}],
            "pending": [{"metadata": {"name": "j"}, "spec": {"parallelism": "x"}}],
        },
        {
            "nodes": [{"metadata": {"name": "a"}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}}],
            "pending": [{"metadata": {"name": "j", "annotations": [3]}, "spec": 7}],
        },
    ],
)
def test_malformed_kubernetes_records_are_told(document: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        advise_kubernetes(document)


def test_a_master_counts_as_a_worker_and_pods_of_more_gpus_are_not_advised() -> None:
    template = {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "4"}}}]}}
    notes = {"loadmaster.dev/seconds": '{"1": 100, "4": 30}', "loadmaster.dev/deadline-seconds": "50"}
    roles = {"Master": {"replicas": 1}, "Worker": {"replicas": 1}}
    nodes = [{"metadata": {"name": "a"}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}]
    with_master = {"metadata": {"name": "m", "annotations": notes}, "spec": {"pytorchReplicaSpecs": roles}}
    wide = {"metadata": {"name": "w", "annotations": notes}, "spec": {"parallelism": 2, "template": template}}
    one, two = advise_kubernetes({"nodes": nodes, "pending": [with_master, wide]})
    assert (one.requested, one.advised) == (2, 4)
    assert json.loads(one.action)["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 3
    assert (two.admit, two.requested, two.action) == (False, 8, "")
    assert "asks for 4 GPUs" in two.reason


def test_score_on_the_command_line(say, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "log"
    append_entry(log, AdviceEntry("1", "slurm", True, 2, 2, "fits", 50.0, 10.0, 9.0, 11.0, 1.0))
    with log.open("a") as file:
        file.write(json.dumps({"kind": "outcome", "job": "1", "devices": 2, "finish_s": 10.5}) + "\n")
    code, out, _ = say("advise", "score", str(log), "--json")
    assert code == 0
    assert json.loads(out)["coverage"] == 1.0
    code, out, err = say("advise", "shadow", "lsf", "--log", str(log))
    assert code == 2
    assert "unknown scheduler 'lsf'" in err


def test_outcomes_of_a_log_make_the_error_bar(say, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    log, job = tmp_path / "log", tmp_path / "job.toml"
    job.write_text('deadline = "200s"\n[times]\n1 = 100\n')
    for i in range(20):
        append_entry(log, AdviceEntry(str(i), "slurm", True, 2, 2, "fits", 50.0, 10.0, 9.0, 11.0, 1.0))
        with log.open("a") as file:
            row = {"kind": "outcome", "job": str(i), "devices": 2, "finish_s": 15.0}
            file.write(json.dumps(row) + "\n")
    code, out, _ = say("advise", str(job), "--cluster", "1xA100-80GB", "--log", str(log), "--json")
    assert code == 0
    assert json.loads(out)["finish_interval_s"] == [150.0, 150.0]
    assert json.loads(out)["on_time_probability"] == 1.0


@pytest.mark.slow
def test_ray_reserves_the_bundles_that_were_advised(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    from loadmaster.advisor.adapters.ray_cluster import advise_ray

    ray.init(num_cpus=4, include_dashboard=False, logging_level="error", log_to_driver=False)
    try:
        curve = measured_curve({1: 100.0, 2: 55.0, 4: 30.0})
        log = tmp_path / "log"
        entry, bundles = advise_ray("j", curve, deadline_s=60.0, resource="CPU", log=log)
        assert read_log(log)[0] == [replace(entry)]
        assert entry.advised == 2
        assert bundles is not None
        assert bundles.strategy == "STRICT_PACK"
        group = bundles.create()
        ray.get(group.ready(), timeout=60)
        where = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)

        @ray.remote(num_cpus=1, scheduling_strategy=where)
        def one(x: int) -> int:
            return x + 1

        assert ray.get([one.remote(i) for i in range(2)], timeout=60) == [1, 2]
        full, none = advise_ray("k", measured_curve({4: 30.0}), deadline_s=60.0, resource="CPU")
        assert not full.admit
        assert none is None
    finally:
        ray.shutdown()
