"""A plan that is run: the measured timeline has its ops, losses are plain training's, faults are told."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="running needs the extra [torch]")

import loadmaster as lm  # noqa: E402
from loadmaster.core.errors import InputError, PlanError  # noqa: E402
from loadmaster.core.graph import Phase  # noqa: E402
from loadmaster.core.timeline import SpanKind, TimelineOrigin  # noqa: E402
from loadmaster.cost.busy_machine import CALM  # noqa: E402
from loadmaster.cost.database import open_database  # noqa: E402
from loadmaster.cost.keys import collect_keys, step_key  # noqa: E402
from loadmaster.graph.models import CaptureOptions, load_model_parts  # noqa: E402
from loadmaster.graph.origin import origin_of  # noqa: E402
from loadmaster.report.trace import chrome_traces  # noqa: E402
from loadmaster.runtime.run.running import PlanRun  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.last(self.first(x).relu()), labels)

def build(batch=32):
    torch.manual_seed(5)
    return Net(), (torch.randn(batch, 64), torch.arange(batch) % 8)
"""


def written(folder: Path, width: int = 128, text: str = MODEL) -> str:
    (folder / "net.py").write_text(text.replace("WIDTH", str(width)))
    return f"{folder}/net.py:build"


def planned(folder: Path, **asked: Any) -> lm.Placement:
    problem = lm.problem(written(folder), "cpu#0-8MB, cpu#1-8MB", **asked)
    return lm.plan(problem, algorithm="round_robin")


def test_a_captured_graph_remembers_its_source(tmp_path: Path) -> None:
    source = written(tmp_path)
    graph = lm.problem(source, "cpu", batch=4, optimizer="sgd").graph
    assert origin_of(graph) == (source, {"batch": 4, "optimizer": "sgd", "target": "cpu"})
    assert origin_of(lm.problem("gen:chain:20", "cpu").graph) is None


def test_the_measured_timeline_has_the_ops_of_the_plan(tmp_path: Path) -> None:
    placement = planned(tmp_path)
    outcome = lm.run(placement, steps=2)
    measured, graph, plan = outcome.measured, placement.problem.graph, placement.plan
    assert measured is not None
    assert plan is not None
    assert measured.origin == TimelineOrigin.MEASURED
    compute = measured.kind == SpanKind.COMPUTE
    ops = set(measured.item[compute].tolist())
    timed = (graph.phase != Phase.PARAM) & (np.array(graph.op_kind) != "input")
    missed = [graph.op_name[op] for op in np.flatnonzero(timed).tolist() if op not in ops]
    assert all("ones_like" in graph.op_kind[graph.op_name.index(name)] for name in missed), missed
    assert (measured.resource[compute] == plan.device[measured.item[compute]]).all()
    order = np.argsort(measured.start_s[compute], kind="stable")
    starts, ends = measured.start_s[compute][order], measured.end_s[compute][order]
    assert (starts[1:] >= ends[:-1] - 1e-9).all(), "one thread runs one op at a time"


def test_transfers_go_where_the_plan_sends_them(tmp_path: Path) -> None:
    outcome = lm.run(planned(tmp_path), steps=1)
    measured = outcome.measured
    assert measured is not None
    moved = measured.kind == SpanKind.TRANSFER
    assert moved.any()
    assert set(measured.resource[moved].tolist()) <= {1, 2}, "from one device to the other"
    assert outcome.ran.num_transfers.measured == moved.sum()


def test_losses_are_those_of_plain_training(tmp_path: Path) -> None:
    outcome = lm.run(planned(tmp_path), steps=4, seed=3)
    torch.manual_seed(3)
    parts = load_model_parts(written(tmp_path), CaptureOptions())
    model, chance = parts["model"], torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters())
    for loss in outcome.ran.losses:
        x = torch.randn(32, 64, generator=chance)
        labels = (torch.arange(32) % 8)[torch.randperm(32, generator=chance)]
        own = model(x, labels)
        own.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert own.item() == loss


def test_memory_and_steps_are_reported(tmp_path: Path) -> None:
    told: list[tuple[int, dict[str, int]]] = []
    outcome = lm.run(planned(tmp_path), steps=3, tell=lambda *news: told.append((news[0], news[3])))
    ran = outcome.ran
    assert [number for number, _ in told] == [1, 2, 3]
    assert all(set(live) == {"cpu#0", "cpu#1"} for _, live in told)
    assert (ran.steps_done, ran.ended, len(ran.step_times_s)) == (3, "done", 3)
    for device in ran.devices:
        assert device.peak_bytes.measured is not None
        assert device.peak_bytes.measured <= 1.05 * device.peak_bytes.predicted
        assert device.busy_s.measured is not None
    trace = json.loads(chrome_traces({"a": outcome.predicted, "b": outcome.predicted}, _graph(outcome)))
    titles = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert {"a: cpu#0", "b: cpu#1", "b: links"} <= titles


def _graph(outcome: Any) -> lm.Graph:
    graph: lm.Graph = outcome.placement.problem.graph
    return graph


def test_calibration_makes_the_prediction_of_compute_right(tmp_path: Path) -> None:
    placement, database = planned(tmp_path), tmp_path / "costs.sqlite"
    outcome = lm.run(placement, steps=2, calibrate=True, database=database)
    keys = collect_keys(placement.problem.graph)
    with open_database(database) as known:
        rows = {row.signature: row.seconds for row in known.rows()}
    assert outcome.ran.num_calibrated == len(rows)
    assert set(rows) <= set(keys.text)
    assert len(rows) >= 0.9 * len(keys.text)
    again = lm.problem(
        written(tmp_path), "cpu#0-8MB, cpu#1-8MB", costs="measured", measure_budget=0, database=database
    )
    known_ops = np.flatnonzero([key >= 0 and keys.text[key] in rows for key in keys.of_op])
    wanted = [rows[keys.text[keys.of_op[op]]] for op in known_ops.tolist()]
    assert np.allclose(again.costs.compute_s[known_ops, 0], wanted)


def test_the_sum_of_ops_is_the_whole_step_that_was_run(tmp_path: Path) -> None:
    placement, database = planned(tmp_path), tmp_path / "costs.sqlite"
    lm.run(placement, steps=8, calibrate=True, database=database)
    key = step_key(collect_keys(placement.problem.graph))
    with open_database(database) as known:
        known.put([replace(row, moment=CALM) for row in known.rows()])  # however busy this machine is
        (whole,) = (row for row in known.rows() if row.signature == key)
    again = lm.problem(
        written(tmp_path), "cpu#0-8MB, cpu#1-8MB", costs="measured", measure_budget=0, database=database
    )
    assert again.costs.compute_s[:, 0].sum() == pytest.approx(whole.seconds)


def test_a_run_on_a_busy_machine_says_that_it_was(tmp_path: Path) -> None:
    nobody: Any = None
    running = PlanRun(nobody, planned(tmp_path), nobody, nobody, busy=True, others_cores=1.75)
    (note,) = running._note_busy_machine()
    assert note.startswith("this machine was busy: other work used 1.8 of its")
    assert not PlanRun(nobody, running.placement, nobody, nobody)._note_busy_machine()


@pytest.mark.parametrize("asked", [{"accumulation": 3}, {"precision": "bf16-mixed"}, {"precision": "bf16"}])
def test_a_step_is_run_as_it_was_captured(tmp_path: Path, asked: dict[str, Any]) -> None:
    whole = MODEL.replace("def forward(self, x, labels)", "def forward(self, x)")
    whole = whole.replace("nn.functional.cross_entropy(", "").replace(".relu()), labels)", ".relu())")
    source = written(tmp_path, text=whole.replace(", torch.arange(batch) % 8)", ",)"))
    placement = lm.plan(lm.problem(source, "cpu#0-8MB, cpu#1-8MB", **asked), algorithm="round_robin")
    outcome = lm.run(placement, steps=2)
    assert outcome.ran.ended == "done"
    assert all(loss is not None and math.isfinite(loss) for loss in outcome.ran.losses)
    assert outcome.ran.num_ops_measured >= 0.75 * (placement.problem.graph.phase != Phase.PARAM).sum()


def test_a_model_that_changed_since_is_refused_with_what_changed(tmp_path: Path) -> None:
    placement = planned(tmp_path)
    written(tmp_path, width=96)
    with pytest.raises(PlanError, match=r"'first.weight' was .*128,64.*, is .*96,64"):
        lm.run(placement, steps=1)
    written(tmp_path, text=MODEL.replace(".relu()", ".relu().tanh()"))
    with pytest.raises(PlanError, match=r"op 'tanh'.* new"):
        lm.run(placement, steps=1, model=f"{tmp_path}/net.py:build")


def test_a_plan_of_no_known_model_asks_for_it() -> None:
    placement = lm.plan(lm.problem("gen:chain:20", "cpu"), algorithm="single_device")
    with pytest.raises(InputError, match="name it with --model"):
        lm.run(placement)
    with pytest.raises(InputError, match="steps is 0"):
        lm.run(placement, steps=0)


def test_a_module_in_place_of_a_source_is_told_about_lm_place() -> None:
    placement = lm.plan(lm.problem("gen:chain:20", "cpu"), algorithm="single_device")
    with pytest.raises(InputError, match=r"model is a Linear; give its source .* use lm.place"):
        lm.run(placement, model=torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_loss_that_is_no_number_ends_the_run_at_its_step(tmp_path: Path) -> None:
    text = MODEL.replace("torch.manual_seed(5)", "torch.manual_seed(5); lr = 1e38")
    text += "\n\ndef wild():\n    model, args = build()\n"
    text += "    sgd = lambda weights: torch.optim.SGD(weights, lr=1e38)\n"
    text += "    return {'model': model, 'args': args, 'optimizer': sgd}\n"
    written(tmp_path, text=text)
    problem = lm.problem(f"{tmp_path}/net.py:wild", "cpu#0-8MB, cpu#1-8MB")
    ran = lm.run(lm.plan(problem, algorithm="round_robin"), steps=8).ran
    assert ran.ended in ("loss is nan", "loss is inf")
    assert ran.steps_done == len(ran.losses) < 8
    assert ran.losses[-1] is None
    assert all(loss is not None for loss in ran.losses[:-1])


def test_an_interrupt_leaves_what_was_measured(tmp_path: Path) -> None:
    def stop(number: int, *news: Any) -> None:
        if number == 2:
            raise KeyboardInterrupt

    ran = lm.run(planned(tmp_path), steps=9, tell=stop).ran
    assert (ran.ended, ran.steps_done) == ("interrupted", 2)
    assert ran.step_s.measured is not None
