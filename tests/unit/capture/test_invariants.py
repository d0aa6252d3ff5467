"""What holds for every captured graph, by every path: against torch.export, torch's flop counter, itself."""

import collections
import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra [torch]")
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from loadmaster.core.graph import NO_GROUP, NO_MIRROR, Phase, held_bytes  # noqa: E402
from loadmaster.graph.capture import capture  # noqa: E402
from tests.allocations import plain_loss  # noqa: E402
from tests.coarsening import coarsen, label_by_module  # noqa: E402
from tests.torch_models import NAMES, example  # noqa: E402
from tests.unit.capture.test_memory import captured  # noqa: E402

PATHS = (None, "traced", "estimated")
QUICK = ("gpt2", "resnet", "lstm", "branching")
CASES = [
    pytest.param(name, path, marks=() if path is None or name in QUICK else pytest.mark.slow)
    for name in NAMES
    for path in PATHS
]
BY_EXPORT = tuple(name for name in NAMES if name not in ("mixtral", "branching"))
# products by groups and recurrent layers: torch's counter knows neither
UNCOUNTED = {"_grouped_mm", "grouped_mm", "lstm", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}


def nodes_of(module: Any, prefix: str = "") -> list[str]:
    """Names of all calls in an exported graph; a region without gradients is taken apart."""
    found = []
    for node in module.graph.nodes:
        if node.op != "call_function" or "_assert" in str(node.target):
            continue
        inner = [getattr(module, arg.target) for arg in node.args if getattr(arg, "op", "") == "get_attr"]
        inner = [part for part in inner if isinstance(part, torch.fx.GraphModule)]
        found += nodes_of(inner[0], f"{prefix}{node.name}.") if inner else [f"{prefix}{node.name}"]
    return found


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # of torch.export, on recurrent layers
@pytest.mark.parametrize("name", BY_EXPORT)
def test_forward_ops_are_the_exported_graphs_nodes_in_their_order(name: str) -> None:
    e = example(name)
    program = torch.export.export(e.model, e.args, e.kwargs, strict=False)
    graph = captured(name, None)
    assert graph.capture.startswith("joint")
    inputs = [op for op, kind in zip(graph.op_name, graph.op_kind, strict=True) if kind == "input"]
    assert inputs == list(program.graph_signature.user_inputs)
    forward = [graph.op_name[op] for op in np.flatnonzero(graph.phase == Phase.FORWARD)]
    forward = [op for op in forward if op not in inputs and not op.startswith("loss.")]
    assert forward == nodes_of(program.graph_module)
    assert len(forward) > 5


@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param(name, path, marks=() if path == first or name in QUICK else pytest.mark.slow)
        for name in NAMES
        for first in ["joint" if name in BY_EXPORT else "traced"]
        for path in dict.fromkeys((first, "traced"))
    ],
)
def test_flops_are_those_of_torchs_own_counter_on_the_ops_it_knows(name: str, path: str) -> None:
    e = example(name)
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's flash kernel is not among the counter's ops
        graph = capture(e.model, e.args, e.kwargs, path=path)
        with FlopCounterMode(display=False) as counter:
            plain_loss(e.model(*e.args, **e.kwargs)).backward()
    known = [kind not in UNCOUNTED for kind in graph.op_kind]
    assert graph.flops[known].sum() == counter.get_total_flops() > 0


@pytest.mark.parametrize("target", [None, "cuda"])
def test_keys_that_heads_share_are_counted_once_for_each_head(
    target: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where torch's own formula, as it is in 2.11, knows nothing of them."""

    def as_it_is(query: Any, key: Any, value: Any) -> int:
        assert query[:2] == key[:2] == value[:2]
        return 4 * math.prod(query) * int(key[2])

    monkeypatch.setattr("torch.utils.flop_counter.sdpa_flop_count", as_it_is)
    attention = Shared().to(torch.bfloat16)
    graph = capture(attention, (torch.randn(3, 5, 32, dtype=torch.bfloat16),), target=target)
    work = {
        phase: sum(graph.flops[op] for op in np.flatnonzero(graph.phase == phase)
                   if "attention" in graph.op_kind[op])
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    }  # fmt: skip
    forward = 2 * 2 * 3 * 4 * 5 * 5 * 8  # two products, batch, heads, queries, keys, width
    assert work == {Phase.FORWARD: forward, Phase.BACKWARD: 2.5 * forward}


class Shared(torch.nn.Module):
    """Attention of four heads over the keys and values of two."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(32, width) for width in (32, 16, 16))

    def forward(self, x: Any) -> Any:
        made = [made(x).unflatten(-1, (-1, 8)).transpose(1, 2) for made in (self.query, self.key, self.value)]
        return torch.nn.functional.scaled_dot_product_attention(*made, enable_gqa=True)


@pytest.mark.parametrize(("name", "path"), CASES)
def test_the_order_is_topological_and_phases_follow_each_other(name: str, path: str | None) -> None:
    graph = captured(name, path)
    assert (graph.tensor_op[graph.use_tensor] < graph.use_op).all()
    ran = graph.phase[graph.phase != Phase.PARAM]
    assert (np.diff(ran) >= 0).all()
    assert set(ran.tolist()) == {Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE}


@pytest.mark.parametrize(("name", "path"), CASES)
def test_every_trained_weight_has_one_update_that_reads_its_gradient(name: str, path: str | None) -> None:
    graph, model = captured(name, path), example(name).model
    e = example(name)
    (e.loss or plain_loss)(e.model(*e.args, **e.kwargs)).backward()
    trained = {weight for weight, tensor in e.model.named_parameters() if tensor.grad is not None}
    updates = [graph.op_name[op] for op in np.flatnonzero(graph.phase == Phase.UPDATE)]
    assert sorted(updates) == sorted(f"{weight}.update" for weight in trained)
    sizes = {weight: tensor.numel() * tensor.element_size() for weight, tensor in model.named_parameters()}
    for weight in trained:
        update = graph.op_name.index(f"{weight}.update")
        read = graph.use_tensor[graph.use_op == update]
        grads = [tensor for tensor in read if graph.phase[graph.tensor_op[tensor]] == Phase.BACKWARD]
        assert [int(graph.tensor_bytes[tensor]) for tensor in grads] == [sizes[weight]]
        assert graph.group[update] == graph.group[graph.op_name.index(weight)] != NO_GROUP


@pytest.mark.parametrize(("name", "path"), CASES)
def test_each_product_has_its_products_backward(name: str, path: str | None) -> None:
    graph = captured(name, path)
    back = np.flatnonzero((graph.phase == Phase.BACKWARD) & (graph.mirror != NO_MIRROR))
    work = np.bincount(graph.mirror[back], minlength=graph.num_ops)
    trained = {name for name, weight in example(name).model.named_parameters() if weight.requires_grad}
    needs = np.array([op in trained for op in graph.op_name])
    for op, tensor in sorted(zip(graph.use_op.tolist(), graph.use_tensor.tolist(), strict=True)):
        needs[op] |= needs[graph.tensor_op[tensor]]  # what comes of positions alone has no gradient
    products = np.flatnonzero((graph.phase == Phase.FORWARD) & (graph.flops > 0) & needs)
    assert len(products) >= 2
    assert (work[products] >= 1).all()
    flops = np.zeros(graph.num_ops)
    np.add.at(flops, graph.mirror[back], graph.flops[back])
    ratio = flops[products] / graph.flops[products]
    assert (ratio >= 1).all()
    assert (ratio <= 2.5).all()
    assert (graph.group[back] == graph.group[graph.mirror[back]]).all()


@pytest.mark.parametrize("path", PATHS)
def test_all_that_reads_a_tied_weight_reads_one_op(path: str | None) -> None:
    graph = captured("gpt2", path)
    assert "lm_head.weight" not in graph.op_name
    weight = graph.op_name.index("transformer.wte.weight")
    storage = graph.tensor_storage[np.flatnonzero(graph.tensor_op == weight)[0]]
    looks = np.flatnonzero(graph.tensor_storage == storage)
    readers = {graph.op_kind[op] for op in graph.use_op[np.isin(graph.use_tensor, looks)]}
    assert {"embedding", "update"} <= readers
    assert readers & {"linear", "mm"}
    adds = [graph.op_kind[op] for op in np.flatnonzero(graph.mirror != NO_MIRROR)]
    assert any(kind.startswith("add") for kind in adds)  # both of its gradients are one


@pytest.mark.parametrize(("name", "path"), CASES)
def test_coarsening_keeps_bytes_and_flops(name: str, path: str | None) -> None:
    graph = captured(name, path)
    for depth in (1, 2):
        coarse = coarsen(graph, label_by_module(graph, depth)).graph
        assert coarse.num_ops < graph.num_ops
        assert coarse.flops.sum() == pytest.approx(graph.flops.sum(), rel=1e-12)
        assert coarse.bytes_moved.sum() == graph.bytes_moved.sum()
        assert held_bytes(coarse).sum() == held_bytes(graph).sum()


@pytest.mark.parametrize("name", NAMES)
def test_the_share_of_the_backward_pass_that_is_attributed_is_said(name: str) -> None:
    graph = captured(name, None)
    words = next(word for word in graph.capture.split("; ") if word.endswith("% of backward attributed"))
    assert float(words.split()[0]) >= 92.0
    if name in BY_EXPORT:
        counts = collections.Counter(graph.op_name)
        assert max(counts.values()) == 1
        assert words.startswith("100.0 %")
