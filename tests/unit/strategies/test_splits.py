"""Splits: rows are followed op by op; the probe, which runs ops, is the witness of the rules."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from loadmaster.core.graph import NO_MIRROR, Graph, Phase
from loadmaster.cost.signature import TensorSpec, parse_signature
from loadmaster.graph.capture import capture
from loadmaster.strategies.splitting.forms import Form, Splits
from loadmaster.strategies.splitting.probe import Probe
from loadmaster.strategies.splitting.rules import Arg, Call, Formed, Unsplittable, apply_rule
from loadmaster.strategies.splitting.splits import PER_REPLICA_NORM, PER_REPLICA_RANDOM, find_splits
from loadmaster.strategies.splitting.units import find_units
from tests.unit.strategies.models import along_step, mixed_step, wide_step


def reasons(graph: Graph, splits: Splits) -> dict[str, str]:
    return {graph.op_kind[op]: why for op, why in splits.reason.items()}


def test_every_op_of_a_usual_model_splits_and_every_gradient_is_a_sum() -> None:
    graph = mixed_step()
    splits = find_splits(graph, 6)
    assert reasons(graph, splits) == {}
    updates = np.flatnonzero(graph.phase == Phase.UPDATE)
    assert len(updates) > 8
    for op in updates:
        read = graph.use_tensor[graph.use_op == op]
        made = read[graph.phase[graph.tensor_op[read]] == Phase.BACKWARD]
        assert splits.form[made].tolist() == [Form.SUM], graph.op_name[op]


def test_the_loss_is_a_mean_and_the_inputs_are_rows() -> None:
    graph = wide_step()
    splits = find_splits(graph, 6)
    kind = np.array(graph.op_kind)
    assert (splits.form[np.isin(graph.tensor_op, np.flatnonzero(kind == "input"))] == Form.PART).all()
    loss = np.flatnonzero(graph.tensor_bytes == 4)[0]
    assert splits.form[loss] == Form.WEIGHTED


def test_the_gradient_of_a_mean_is_rows_though_it_is_one_value() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    graph = capture(layers, (torch.zeros(4, 8),), optimizer="sgd", loss=torch.mean)
    splits = find_splits(graph, 4)  # as many rows as outputs
    assert splits.reason == {}
    updates = np.flatnonzero(graph.phase == Phase.UPDATE)
    read = graph.use_tensor[np.isin(graph.use_op, updates)]
    made = read[graph.phase[graph.tensor_op[read]] == Phase.BACKWARD]
    assert splits.form[made].tolist() == [Form.SUM] * 4


def test_batch_norm_and_dropout_are_said_to_differ() -> None:
    splits = find_splits(mixed_step(), 6)
    assert set(splits.deviations.values()) == {PER_REPLICA_NORM, PER_REPLICA_RANDOM}


def test_batch_norm_in_evaluation_does_not_differ() -> None:
    graph = along_step(lambda x: torch.nn.functional.batch_norm(x, torch.zeros(16), torch.ones(16)))
    assert find_splits(graph, 16).deviations == {}


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        (lambda x: x.cumsum(0), "cumsum"),
        (lambda x: x @ x.t(), "matmul"),
        (lambda x: x.softmax(0), "softmax"),
        (lambda x: x.reshape(4, 4, 16).transpose(0, 1).reshape(16, 16).flip(0), "reshape"),
        (lambda x: x.flip(0), "flip"),
        (lambda x: x[1:], "slice"),
        (lambda x: x - x.mean(0), "sub"),
        (lambda x: x.sort(0).values, "sort"),
    ],
)
def test_an_op_that_mixes_rows_does_not_split(op: Any, kind: str) -> None:
    # Batch and width are both 16: sizes alone cannot tell rows from columns.
    splits = find_splits(along_step(op), 16)
    assert splits.reason, kind


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.cumsum(1),
        lambda x: x.softmax(1),
        lambda x: x.flip(1),
        lambda x: x.t().exp().t(),
        lambda x: x[:, 1:],
    ],
)
def test_an_op_that_works_within_rows_splits(op: Any) -> None:
    assert find_splits(along_step(op), 16).reason == {}


def test_flattening_batch_first_splits_and_interleaving_does_not() -> None:
    first = along_step(lambda x: x.view(16, 4, 4).reshape(64, 4).exp().reshape(16, 16))
    assert find_splits(first, 16).reason == {}
    mixed = along_step(lambda x: x.view(16, 4, 4).transpose(0, 1).reshape(64, 4).exp().reshape(16, 16))
    assert "interleaved" in " ".join(find_splits(mixed, 16).reason.values())


def test_rules_say_what_the_probe_sees() -> None:
    """Every op of the model is run whole and in pieces; batch norm is the declared exception."""
    seen: list[tuple[str, list[Formed], Any]] = []
    probe = Probe()

    def compare(call: Call) -> None:
        try:
            found = probe(call)
        except Unsplittable:
            found = []
        if found is not None and "batch_norm" not in call.name:
            seen.append((call.name, apply_rule(call) or [], found))

    from loadmaster.strategies.splitting import splits as module

    plain = module.apply_rule
    module.apply_rule = lambda call: (compare(call), plain(call))[1]  # type: ignore[attr-defined]
    try:
        find_splits(mixed_step(), 6)
    finally:
        module.apply_rule = plain  # type: ignore[attr-defined]
    views = ("select", "transpose", "permute")  # of a larger memory, which the probe does not see
    ruled = [(n, r, p) for n, r, p in seen if n not in views]
    assert [(n, r, p) for n, r, p in ruled if r != p] == []
    assert len({name for name, _, _ in seen}) >= 12


def spec(*shape: int) -> TensorSpec:
    stride = tuple(int(np.prod(shape[d + 1 :])) for d in range(len(shape)))
    return TensorSpec("float32", shape, stride)


@pytest.mark.parametrize(
    ("text", "dims", "form"),
    [
        ("aten.exp.default float32[6,4]", [0], Form.PART),
        ("aten.mm.default float32[6,4] float32[4,3]", [0, -1], Form.PART),
        ("aten.mm.default float32[4,6]/1,4 float32[6,3]", [1, 0], Form.SUM),
        ("aten.sum.dim_IntList float32[6,4] (0)", [0], Form.SUM),
        ("aten.sum.dim_IntList float32[6,4] (1)", [0], Form.PART),
        ("aten.mean.dim float32[6,4] (0)", [0], Form.WEIGHTED),
        ("aten.mean.default float32[6,4]", [0], Form.WEIGHTED),
        ("aten.softmax.int float32[6,4] 1", [0], Form.PART),
        ("aten.softmax.int float32[6,4] 0", [0], None),
        ("aten.cumsum.default float32[6,4] 0", [0], None),
        ("aten.cumsum.default float32[6,4] 1", [0], Form.PART),
        ("aten.flip.default float32[6,4] (0)", [0], None),
        ("aten.amax.default float32[6,4] (0)", [0], None),
        ("aten.bmm.default float32[6,2,3] float32[6,3,2]", [0, 0], Form.PART),
        ("aten.relu.default float32[6,4]", [0], Form.PART),
    ],
)
def test_the_probe_tells_parts_sums_and_weighted_means_apart(
    text: str, dims: list[int], form: Form | None
) -> None:
    signature = parse_signature(text)
    assert signature is not None
    args = tuple(
        Arg(word, Form.PART if dim >= 0 else Form.FULL, 1 if dim >= 0 else 0, dim, weight=False)
        for word, dim in zip(signature.tensors, dims, strict=True)
    )
    call = Call(signature.op[1], signature, args, (0,), 6)
    if form is None:
        with pytest.raises(Unsplittable):
            Probe()(call)
        return
    assert Probe()(call) is not None
    assert [found for found, _ in Probe()(call) or []] == [form]


def test_an_op_without_a_rule_is_left_to_the_probe() -> None:
    graph = along_step(lambda x: torch.special.expit(x).sinh())
    assert any("no rule" in why for why in find_splits(graph, 16).reason.values())
    probed = find_splits(graph, 16, probe=Probe())
    assert not any("sinh" in graph.op_kind[op] for op in probed.reason)


def test_a_graph_without_signatures_does_not_split() -> None:
    from loadmaster.graph.transformer import transformer

    graph = transformer(num_layers=1, width=8, num_heads=2, seq=4, batch=2, vocab=11)
    splits = find_splits(graph, 2)
    assert not splits.scales.any()


def test_units_hold_together_what_must_be_in_one_group() -> None:
    graph = mixed_step()
    unit, num = find_units(graph, find_splits(graph, 6))
    assert unit.max() + 1 == num > 10
    back = np.flatnonzero(graph.mirror != NO_MIRROR)
    assert (unit[back] == unit[graph.mirror[back]]).all()
    weight = graph.phase[graph.tensor_op[graph.use_tensor]] == Phase.PARAM
    assert (unit[graph.use_op[weight]] == unit[graph.tensor_op[graph.use_tensor[weight]]]).all()
