"""Fit: breakdowns against hand computations and real runs, batches and changes against fresh simulations."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loadmaster as lm
from loadmaster import api
from loadmaster.capacity.accumulate import with_accumulated_gradients
from loadmaster.capacity.breakdown import modules_of, parts_of
from loadmaster.capacity.clusters import preset_cluster, single_device_cluster, with_more, with_preset
from loadmaster.capacity.largest import find_largest
from loadmaster.capacity.peak_moment import HeldMemory, replay_to_peaks
from loadmaster.capacity.scale import scale_graph
from loadmaster.capacity.step_setting import setting_of
from loadmaster.cluster.parse import parse_cluster
from loadmaster.cluster.presets import KINDS
from loadmaster.core.answers.fit_answer import Fit, Parts
from loadmaster.core.errors import InputError, UnknownNameError
from loadmaster.core.graph import Graph, Phase
from loadmaster.core.plan import plan_of
from loadmaster.core.question import Question
from loadmaster.graph.build import GraphBuilder
from loadmaster.simulator.events.engine import prepare
from tests.builders import plan_on, problem_of, star_cluster

PARTS = ("weights", "gradients", "optimizer", "activations", "workspace", "resident")


def alone(graph: Graph) -> HeldMemory:
    problem = api.problem(graph, "H200")
    own = plan_of(np.zeros(graph.num_ops, np.int32), np.arange(graph.num_ops, dtype=np.int32))
    outcome, held = replay_to_peaks(prepare(problem), own)
    assert held[0].peak_bytes == outcome.peak_bytes[0]
    return held[0]


def parts(**sizes: int) -> Parts:
    return Parts(**{f"{name}_bytes": sizes.get(name, 0) for name in PARTS}, total_bytes=sum(sizes.values()))


def tiny_step(*, late: int = 0) -> Graph:
    """w (10 bytes, 20 of state), x -> y (6, saved) -> gradient (10) -> update, which takes `late`."""
    b = GraphBuilder("tiny")
    w = b.op("net.w", phase=Phase.PARAM, module="net", resident_bytes=30, group=1)
    x = b.op("x", kind="input")
    y = b.op("net.y", module="net", workspace_bytes=100 - late)
    g = b.op("net.y.back", module="net", phase=Phase.BACKWARD, mirror=y, workspace_bytes=3)
    u = b.op("net.w.update", module="net", phase=Phase.UPDATE, workspace_bytes=late, group=1)
    weight, given = b.tensor(w, 10), b.tensor(x, 2, keep=True)
    saved = b.tensor(y, 6)
    grad = b.tensor(g, 10, keep=True)
    for tensor, op in ((weight, y), (given, y), (saved, g), (weight, g), (grad, u), (weight, u)):
        b.use(tensor, op)
    return b.build()


# ---- what is held at the peak


def test_a_peak_in_the_forward_pass_holds_no_gradient() -> None:
    # while y runs: w and its state 30, x 2, y 6, workspace 100
    held = alone(tiny_step())
    expected = parts(weights=10, optimizer=20, activations=8, workspace=100)
    assert parts_of(tiny_step(), held) == expected
    assert held.peak_bytes == 138


def test_a_peak_in_the_update_holds_the_gradient_and_no_saved_value() -> None:
    # while the update runs: w and its state 30, x 2 (kept), gradient 10, workspace 100
    graph = tiny_step(late=100)
    expected = parts(weights=10, optimizer=20, activations=2, gradients=10, workspace=100)
    assert parts_of(graph, alone(graph)) == expected


def test_what_has_no_module_and_what_has_one_add_up_to_the_whole() -> None:
    rows = modules_of(tiny_step(), alone(tiny_step()))
    sizes = {row.module: row.parts.total_bytes for row in rows}
    assert sizes == {"": 138, "net": 136, "(no module)": 2}
    assert [row.depth for row in rows] == [0, 1, 1]


def test_a_copy_of_a_weight_elsewhere_counts_as_weight_there() -> None:
    graph = tiny_step()
    problem = problem_of(graph, star_cluster(2), 1.0)
    plan = plan_on([0, 1, 1, 1, 0])
    outcome, held = replay_to_peaks(prepare(problem), plan)
    assert [h.peak_bytes for h in held] == outcome.peak_bytes.tolist()
    away = parts_of(graph, held[1])
    assert away == parts(weights=10, activations=8, workspace=100)
    home = parts_of(graph, held[0])
    assert (home.weights_bytes, home.optimizer_bytes, home.gradients_bytes) == (10, 20, 10)


def test_bytes_that_a_file_does_not_tell_apart_are_resident() -> None:
    b = GraphBuilder("plain")
    b.op("a", resident_bytes=7)
    assert parts_of(b.build(), alone(b.build())) == parts(resident=7)


def test_a_frozen_weight_and_a_buffer_hold_no_optimizer_state() -> None:
    b = GraphBuilder("frozen")
    w = b.op("w", phase=Phase.PARAM, resident_bytes=30, group=1)
    b.op("buffer", phase=Phase.PARAM, kind="buffer", resident_bytes=5)  # nobody reads it: no tensor
    u = b.op("update", phase=Phase.UPDATE, group=1)
    b.use(b.tensor(w, 10), u)
    assert parts_of(b.build(), alone(b.build())) == parts(weights=15, optimizer=20)


def test_of_modules_that_are_alike_one_is_opened() -> None:
    b = GraphBuilder("layers")
    for layer in range(40):
        for name, size in (("up", 5), ("down", 3)):
            b.op(f"{layer}.{name}", module=f"net.{layer}.{name}", resident_bytes=size)
    b.op("head", module="head", resident_bytes=50)
    rows = modules_of(b.build(), alone(b.build()), most=8)
    assert [row.module for row in rows[:5]] == ["", "net", "net.0", "net.0.up", "net.0.down"]
    assert [row.module for row in rows[5:]] == [*(f"net.{layer}" for layer in range(1, 40)), "head"]
    assert [row.parts.total_bytes for row in rows[:5]] == [370, 320, 8, 5, 3]


# ---- gradients that are added up


def test_gradients_of_earlier_passes_are_there_from_the_beginning() -> None:
    graph = with_accumulated_gradients(tiny_step())
    assert alone(graph).peak_bytes == 148  # 138 and the gradient of 10
    late = with_accumulated_gradients(tiny_step(late=100))
    assert alone(late).peak_bytes == 142  # the update reads that gradient, not one more


# ---- the largest batch


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 9, 30, 31, 1000])
@pytest.mark.parametrize("start", [1, 2, 8, 31, 999, 1000])
def test_the_largest_number_is_found_from_any_start(limit: int, start: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= limit

    assert find_largest(fits, start, most=1000) == limit
    assert len(asked) == len(set(asked)) <= 22
    if start == limit < 1000:
        assert asked == [limit, limit + 1]


def two_sizes(batch: int) -> Graph:
    b = GraphBuilder(f"batch {batch}")
    x = b.op("x", flops=2.0 * batch, bytes_moved=4 * batch, workspace_bytes=3 + batch)
    b.use(b.tensor(x, 8 * batch + 5), b.op("y"))
    return b.build()


def test_a_line_through_two_batches_gives_a_third_to_the_byte() -> None:
    found = scale_graph(two_sizes(4), two_sizes(8), 4, 8, 21)
    assert found is not None
    assert found.digest == two_sizes(21).digest


def test_there_is_no_line_through_graphs_that_differ() -> None:
    other = GraphBuilder("other")
    other.op("x")
    assert scale_graph(two_sizes(4), other.build(), 4, 8, 16) is None
    assert scale_graph(two_sizes(4), two_sizes(8), 4, 8, -9) is None


# ---- other clusters


def test_a_device_alone_is_that_device() -> None:
    cluster = parse_cluster("V100, 2xT4, cpu-64GB")
    lone = single_device_cluster(cluster, 3)
    assert (lone.num_devices, lone.kind_name, int(lone.memory_bytes[0])) == (1, ("cpu16",), 64 * 10**9)


def test_more_devices_are_like_the_one_named_and_reach_all_others() -> None:
    cluster = parse_cluster("V100, T4")
    more = with_more(cluster, 1, 2)
    assert [more.kind_name[k] for k in more.kind] == ["V100", "T4", "T4", "T4"]
    assert len(set(more.device_name)) == len(set(more.engine.tolist())) == 4
    hosted = with_preset(single_device_cluster(cluster, 0), KINDS["cpu16"])
    assert hosted.on_host[hosted.kind].tolist() == [False, True]


# ---- the whole answer, for graphs that are not models


def test_a_graph_that_is_no_model_is_offered_no_batch() -> None:
    found = lm.fit("gen:transformer:200", "RTX2080-2GB, T4-2GB", optimizer="adamw")
    assert found.fits is False
    assert all(device.largest is None for device in found.devices)
    assert {change.name for change in found.changes} >= {
        "precision",
        "optimizer",
        "host",
        "devices",
        "device",
    }
    assert not {"accumulate", "recompute"} & {change.name for change in found.changes}


def test_the_smallest_preset_holds_it_and_no_smaller_one_does() -> None:
    found = lm.fit("gen:transformer:1500", "RTX2080")
    device = next(change for change in found.changes if change.name == "device")
    assert device.fits
    assert device.text.startswith("1xL4")
    graph = api.problem("gen:transformer:1500", "L4").graph
    own = plan_of(np.zeros(graph.num_ops, np.int32), np.arange(graph.num_ops, dtype=np.int32))
    peak = int(api.simulate(api.problem(graph, "H200"), own).peak_bytes[0])
    gpus = [kind for kind in KINDS.values() if not kind.on_host and kind.name != "ref"]
    assert found.devices[0].needs_bytes == peak == found.parts.total_bytes
    assert min(kind.memory_bytes for kind in gpus if kind.memory_bytes >= peak) == KINDS["L4"].memory_bytes


def test_every_change_that_is_said_to_fit_has_a_plan_of_its_own() -> None:
    found = lm.fit("gen:transformer:1500", "RTX2080", every=True)
    fitting = {change.name: change for change in found.changes if change.fits}
    assert found.cheapest == next(iter(fitting))
    assert lm.plan("gen:transformer:1500", "RTX2080, cpu-64GB", budget="60x").fits == ("host" in fitting)
    assert not lm.plan("gen:transformer:1500", "RTX2080", budget="60x").fits
    assert found.fits is False


def test_a_proof_comes_with_both_numbers() -> None:
    found = lm.fit("gen:transformer:1500", "RTX2080-1GB", quick=True)
    assert found.cluster is not None
    assert found.cluster.proven
    assert found.changes == ()
    assert "all devices have" in found.cluster.reason or "the largest allowed has" in found.cluster.reason


def test_without_devices_every_preset_is_listed() -> None:
    found = lm.fit(api.problem("gen:transformer:200", "H200").graph)
    assert [row.kind for row in found.presets] == [name for name in KINDS if name != "ref"]
    assert all(row.fits == (row.needs_bytes <= row.memory_bytes) for row in found.presets)
    assert found.fits is None


def test_devices_that_the_source_brings_are_asked_and_presets_are_listed() -> None:
    found = lm.fit("gen:chain:20")
    assert len(found.devices) == 4
    assert found.fits is True
    assert found.presets
    assert found.cluster is not None
    limits = [memory or 2**62 for memory in found.cluster.memory_bytes]
    assert (np.array(found.cluster.peak_bytes) <= limits).all()


def test_a_reserve_is_not_to_be_used() -> None:
    found = lm.fit("gen:transformer:200", "T4", reserve_bytes="1GB", quick=True)
    assert found.devices[0].memory_bytes == 15 * 10**9
    presets = lm.fit(api.problem("gen:transformer:200", "H200").graph, reserve_bytes="10GB").presets
    assert {row.kind: row.memory_bytes for row in presets}["T4"] == 6 * 10**9
    assert "RTX2080" not in {row.kind for row in presets}  # nothing is left of its 8 GB


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="no batch"):
        lm.fit("gen:chain:20", batch=3)
    with pytest.raises(UnknownNameError, match="precision"):
        lm.fit("gen:transformer:200", "T4", precision="fp7")
    with pytest.raises(UnknownNameError, match="device kind"):
        lm.fit("gen:chain:20", "NoSuchDevice")
    with pytest.raises(InputError, match="budget"):
        lm.fit("gen:chain:20", budget="soon")


# ---- captured models

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(2)), nn.Linear(64, 8))

def build(batch=64):
    return model(), (torch.randn(batch, 64),)

def fixed():
    return model(), (torch.randn(64, 64),)
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    pytest.importorskip("torch", reason="capture needs the extra [torch]")
    (tmp_path / "net.py").write_text(MODEL)
    return f"{tmp_path / 'net.py'}:build"


def example(source: str, batch: int) -> Any:
    from loadmaster.graph.models import CaptureOptions, load_own_parts
    from loadmaster.zoo.example import Example

    path, _, function = source.rpartition(":")
    given = load_own_parts(path, function, CaptureOptions(batch))
    return Example(given["model"], given["args"])


def cpu_of(num_bytes: int) -> Any:
    return replace(preset_cluster(KINDS["cpu16"]), memory_bytes=np.array([num_bytes]))


def asked(source: str, num_bytes: int, **more: Any) -> Fit:
    return lm.fit(source, cpu_of(num_bytes), **more)


def test_the_parts_of_a_captured_step_are_those_of_a_real_one(source: str) -> None:
    import torch

    from tests.allocations import counted_peak

    found = asked(source, 2**40, batch=64, optimizer="adamw", quick=True)
    real = example(source, 64)
    assert found.parts.total_bytes == pytest.approx(counted_peak(real), rel=0.05)
    weights = sum(w.numel() * w.itemsize for w in real.model.parameters())
    optimizer = torch.optim.AdamW(real.model.parameters())
    real.model(*real.args).mean().backward()
    optimizer.step()
    kept = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    assert found.parts.weights_bytes == weights
    assert found.parts.optimizer_bytes == sum(t.numel() * t.itemsize for t in kept)
    modules = {row.module: row.parts for row in found.modules}
    assert modules["1"].weights_bytes == 4 * (2 * 64 * 256 + 256 + 64)


def test_the_largest_batch_fits_and_one_more_does_not(source: str) -> None:
    limit = 3 * 10**6
    found = asked(source, limit, batch=64).devices[0].largest
    assert found is not None
    assert found.confirmed
    assert found.batch is not None

    def peak(batch: int) -> int:
        problem = api.problem(source, cpu_of(2**40), batch=batch)
        own = np.arange(problem.graph.num_ops, dtype=np.int32)
        plan = plan_of(np.zeros(problem.graph.num_ops, np.int32), own)
        return int(api.simulate(problem, plan).peak_bytes[0])

    assert peak(found.batch) <= limit < peak(found.batch + 1)


def test_captures_of_the_same_settings_are_made_once(source: str) -> None:
    said: list[str] = []
    asked(source, 3 * 10**6, batch=64, progress=lambda message, _: said.append(message))
    captures = [message for message in said if message.startswith("capturing")]
    assert captures
    assert len(captures) == len(set(captures))


def test_a_model_whose_function_takes_no_batch_is_told_so(source: str) -> None:
    found = lm.fit(source.replace(":build", ":fixed"), cpu_of(2**40))
    assert found.devices[0].largest is not None
    assert found.devices[0].largest.note == "give a batch to ask for the largest"


def test_several_passes_peak_where_a_real_loop_does(source: str) -> None:
    import torch

    from tests.allocations import StorageCounter

    real = example(source, 64)
    optimizer = torch.optim.AdamW(real.model.parameters())
    for step in range(2):  # the state is there from the first step on
        counter = StorageCounter()
        state = [t for kept in optimizer.state.values() for t in kept.values()]
        for tensor in [*real.model.parameters(), *real.args, *state]:
            counter.add(tensor)
        with counter:
            for _ in range(2):
                out = real.model(*real.args)
                loss = out.mean()
                loss.backward()
            optimizer.step()
        if step == 0:
            optimizer.zero_grad(set_to_none=True)
            del out, loss
    graph = lm.capture(real.model, real.args, optimizer="adamw")
    assert alone(with_accumulated_gradients(graph)).peak_bytes == pytest.approx(counter.peak_bytes, rel=0.05)


def test_recomputing_holds_less_and_leaves_the_model_as_it_was(source: str) -> None:
    from loadmaster.graph.torch_capture.paths.recompute import checkpoint_blocks, find_blocks
    from tests.allocations import counted_peak

    real = example(source, 2048)
    before = [type(module) for module in real.model.modules()]
    assert len(find_blocks(real.model)) == 2
    plain = alone(lm.capture(real.model, real.args, path="traced"))
    with checkpoint_blocks(real.model):
        thrifty = lm.capture(real.model, real.args, path="traced")
        again = counted_peak(real)
    assert alone(thrifty).peak_bytes == pytest.approx(again, rel=0.05)
    assert alone(thrifty).peak_bytes < 0.85 * plain.peak_bytes
    assert [type(module) for module in real.model.modules()] == before
    assert any(".recompute" in op for op in thrifty.op_name)


def test_the_cheapest_change_is_fewer_samples_a_pass_if_that_does(source: str) -> None:
    whole = asked(source, 2**40, batch=512, quick=True).parts.total_bytes
    found = asked(source, 3 * whole // 5, batch=512)
    assert found.fits is False
    assert found.cheapest == "accumulate"
    change = found.changes[0]
    batch = int(change.text.split(",")[0].removeprefix("batch "))
    assert 512 % batch == 0
    graph = api.problem(source, cpu_of(2**40), batch=batch).graph
    assert alone(with_accumulated_gradients(graph)).peak_bytes <= 3 * whole // 5
    twice = api.problem(source, cpu_of(2**40), batch=2 * batch).graph
    assert alone(with_accumulated_gradients(twice)).peak_bytes > 3 * whole // 5


@pytest.mark.parametrize(
    ("source", "batch", "seq"), [("hf:gpt2", 8, 512), ("keras:lstm", 8, None), ("n.py:f", None, None)]
)
def test_named_models_have_a_batch_and_keras_models_no_length(
    source: str, batch: int | None, seq: int | None
) -> None:
    found = setting_of(Question(source))
    assert (found.batch, found.seq) == (batch, seq)
