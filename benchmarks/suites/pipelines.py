"""Steps of micro-batches: what the planned pipeline gains over simpler ways, on unequal devices. Simulated.

For captured training steps of a whole batch: the plan of `--pipeline auto` against one device, against one
pass placed op by op in torch's order, and, with as many micro-batches, against stages of equal work
(`pipeline_equal`) and stages in proportion to speed (`pipeline_by_speed`). Then published training graphs,
each taken as one of 16 micro-batches. Ratios above 1 say how much longer the other way takes.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import loadmaster as lm
from benchmarks.measure import Report
from loadmaster.core.placement import Placement
from loadmaster.core.problem import Objective, Problem, Split

SUITE = "pipelines"
GRAPHS = Path(__file__).resolve().parents[2].parent / "shared" / "graphs" / "msr"
CAPTURED = (  # model, batch, seq, devices
    ("hf:gpt2", 16, 512, "A100-80GB, V100, T4"),
    ("hf:gpt2", 32, 256, "RTX4090, 2xRTX3090"),
    ("hf:bert-base", 32, 256, "A100-40GB, V100, T4"),
    ("hf:bert-base", 32, 256, "4xT4"),
    ("hf:llama-7b", 8, 512, "H100-80GB, 2xA100-80GB"),
    ("hf:t5-base", 16, 256, "RTX4090, RTX3090, RTX2080"),
    ("hf:vit-base", 32, 512, "2xV100, 2xT4"),
    ("zoo:resnet50", 64, 512, "A100-40GB, V100, V100"),
)
PUBLISHED = (
    "throughput-inputs/LayerGraphs/bert24_training.json",
    "throughput-inputs/LayerGraphs/resnet50_training.json",
    "throughput-inputs/OperatorGraphs/bert_l-6_training.json",
    "throughput-inputs/OperatorGraphs/resnet50_training.json",
    "piper-inputs/bert32a100.json",
    "piper-inputs/gnmt.json",
    "piper-inputs/resnet.json",
)
BUDGET, AIM = "400x", 1.0


@dataclass(frozen=True, slots=True)
class Others:
    """Seconds of the simpler ways; None where they do not fit."""

    one_device: float | None
    one_pass: float | None
    equal: float | None
    by_speed: float | None


def run(report: Report) -> None:
    """All figures of the suite."""
    for source, batch, seq, devices in CAPTURED:
        began = time.process_time()
        placement = lm.plan(
            lm.problem(source, devices, batch=batch, seq=seq),
            pipeline="auto",
            budget=BUDGET,
        )
        _note(report, f"{source}, batch {batch}, {devices}", placement, time.process_time() - began)
    for path in PUBLISHED:
        if not (GRAPHS / path).exists():
            print(f"{path} is not there; the public graphs lie beside the repository")
            continue
        problem = replace(lm.problem(GRAPHS / path), objective=Objective.STEP, split=Split.FREE)
        began = time.process_time()
        placement = lm.plan(replace(problem, pipeline="auto:16"), algorithm="pipeline", budget=BUDGET)
        _note(
            report,
            f"{Path(path).parent.name}/{Path(path).stem}, 16 micro-batches",
            placement,
            time.process_time() - began,
        )


def _note(report: Report, what: str, placement: Placement, cpu_s: float) -> None:
    if placement.score_s is None or placement.plan is None:
        print(f"{what}: {placement.proof}")
        return
    pipeline = placement.plan.pipeline
    how = "one pass"
    if pipeline is not None:
        how = f"{pipeline.schedule}:{pipeline.num_microbatches}, {pipeline.num_stages} stages"
        how += f", {pipeline.num_replicas} replicas" if pipeline.num_replicas > 1 else ""
    report.add(SUITE, f"{what}: step ({how})", placement.score_s, "s")
    report.add(SUITE, f"{what}: gap to the bound ({placement.bound_name})", placement.gap or 0.0, "ratio")
    report.add(SUITE, f"{what}: planning", cpu_s, "cpu s")
    others = _others(placement)
    for name, seconds in (
        ("one device", others.one_device),
        ("one pass, op by op", others.one_pass),
        ("stages of equal work", others.equal),
        ("stages by speed", others.by_speed),
    ):
        if seconds is not None:
            ratio = seconds / placement.score_s
            report.add(SUITE, f"{what}: {name}", ratio, "x", aim=f">= {AIM:g}", reached=ratio >= AIM - 1e-9)
        else:
            print(f"{what}: {name} does not fit or was not asked")


def _others(placement: Placement) -> Others:
    """The simpler ways: members of the answer, and the two rules with as many micro-batches."""
    by_name = {member.name: member.score_s for member in placement.members}
    asked: Problem = placement.problem
    rules: dict[str, float | None] = {}
    if asked.is_stepped:
        count = asked.pipeline.partition(":")[2]
        for name in ("pipeline_equal", "pipeline_by_speed"):
            same = replace(asked, pipeline=f"1f1b:{count}")
            rules[name] = lm.plan(same, algorithm=name, budget="1x").score_s
    return Others(
        by_name.get("one pass, one device"),
        by_name.get("one pass, op by op"),
        rules.get("pipeline_equal"),
        rules.get("pipeline_by_speed"),
    )
