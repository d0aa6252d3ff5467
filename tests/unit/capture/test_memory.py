"""The simulated memory of a captured step against real steps on the CPU."""

import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra [torch]")

from torch.utils._pytree import tree_leaves  # noqa: E402

from loadmaster import api  # noqa: E402
from loadmaster.core.graph import Graph  # noqa: E402
from loadmaster.core.plan import Plan  # noqa: E402
from loadmaster.graph.capture import capture  # noqa: E402
from tests.allocations import StorageCounter, counted_peak, profiled_peak  # noqa: E402
from tests.torch_models import NAMES, example  # noqa: E402

OWN_WORKSPACE = ("resnet", "lstm")  # their CPU kernels take memory for themselves, which no tensor shows


@functools.cache
def captured(name: str, path: str | None) -> Graph:
    e = example(name)
    return capture(e.model, e.args, e.kwargs, loss=e.loss, optimizer=torch.optim.AdamW, path=path)


def simulated_peak(graph: Graph) -> int:
    """On one device, in the graph's own order."""
    problem = api.problem(graph, "1xA100-80GB")
    alone = Plan(
        device=np.zeros(graph.num_ops, dtype=np.int32),
        priority=np.arange(graph.num_ops, dtype=np.float64),
        recompute=np.zeros(graph.num_ops, dtype=np.bool_),
        pipeline=None,
    )
    return int(api.simulate(problem, alone, dispatch="in_order").peak_bytes[0])


@pytest.mark.parametrize("name", NAMES)
def test_simulated_peak_is_that_of_a_real_step(name: str) -> None:
    assert simulated_peak(captured(name, None)) == pytest.approx(counted_peak(example(name)), rel=0.05)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN_WORKSPACE])
def test_simulated_peak_is_what_the_allocator_gave(name: str) -> None:
    assert simulated_peak(captured(name, None)) == pytest.approx(profiled_peak(example(name)), rel=0.05)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", ["traced", "estimated"])
def test_both_fall_backs_agree_with_the_first_choice(name: str, path: str) -> None:
    other = captured(name, path)
    assert other.capture.startswith(path)
    assert simulated_peak(other) == pytest.approx(simulated_peak(captured(name, None)), rel=0.02)


def inference_peak(model: Any, e: Any, *, held: Any = ()) -> int:
    counter = StorageCounter()
    for tensor in tree_leaves((list(e.model.parameters()), list(e.model.buffers()), e.args, e.kwargs, held)):
        if isinstance(tensor, torch.Tensor):
            counter.add(tensor)
    with torch.no_grad(), counter:
        out = model(*e.args, **e.kwargs)
    del out
    return counter.peak_bytes


@pytest.mark.parametrize("name", ["bert", "resnet", "lstm", "branching"])
def test_inference_peaks_where_plain_python_lets_go_of_tensors(name: str) -> None:
    e = example(name)
    e.model.eval()
    graph = capture(e.model, e.args, e.kwargs, train=False, path="traced")
    assert simulated_peak(graph) == pytest.approx(inference_peak(e.model, e), rel=0.01)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_inference_of_the_exported_graph_lets_go_at_the_last_use(name: str) -> None:
    e = example(name)
    e.model.eval()
    graph = capture(e.model, e.args, e.kwargs, train=False, path="joint")
    program = torch.export.export(e.model, e.args, e.kwargs, strict=False).module()
    assert simulated_peak(graph) == pytest.approx(inference_peak(program, e), rel=0.01)
