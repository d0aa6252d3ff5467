"""Roofline times, transfer times and optimizer memory, against values computed by hand."""

import dataclasses
import math

import numpy as np
import pytest

from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.cluster import Cluster
from loadmaster.core.errors import CostError, GraphError, UnknownNameError
from loadmaster.core.graph import NO_STORAGE, Dtype, Graph, Phase
from loadmaster.core.problem import BY_ROUTE, Origin
from loadmaster.cost.memory import OPTIMIZERS, state_bytes, with_optimizer
from loadmaster.cost.roofline import roofline_costs
from loadmaster.cost.transfer import route_bytes_per_s, route_latency_s
from loadmaster.graph.build import GraphBuilder

# ---- roofline


def mixed_ops() -> Graph:
    builder = GraphBuilder("mixed")
    weight = builder.op("weight", kind="param", phase=Phase.PARAM, flops=5.0, bytes_moved=5)
    matmul = builder.op("matmul", flops=157e9, bytes_moved=900)
    half = builder.op("half", flops=125e9, dtype=Dtype.FLOAT16)
    add = builder.op("add", flops=1.0, bytes_moved=9_000_000)
    builder.op("view", kind="view", bytes_moved=10**9)
    builder.op("nothing")
    builder.use(builder.tensor(weight, 8, keep=True), matmul)
    builder.use(builder.tensor(matmul, 8), half, add)
    return builder.build()


def test_an_op_takes_the_larger_of_its_two_terms_plus_the_launch() -> None:
    graph = mixed_ops()
    costs = roofline_costs(graph, parse_cluster("V100, ref"))
    v100 = dict(zip(graph.op_name, costs.compute_s[:, 0], strict=True))
    assert v100["matmul"] == pytest.approx(157e9 / 15.7e12 + 5e-6)  # 10 ms and the launch
    assert v100["half"] == pytest.approx(1e-3 + 5e-6)
    assert v100["add"] == pytest.approx(9e6 / 900e9 + 5e-6)
    ref = dict(zip(graph.op_name, costs.compute_s[:, 1], strict=True))
    assert ref["matmul"] == pytest.approx(0.157)  # no overhead
    assert ref["half"] == pytest.approx(0.125)  # one rate for every dtype


def test_parameters_views_and_empty_ops_take_no_time_and_no_launch() -> None:
    graph = mixed_ops()
    costs = roofline_costs(graph, parse_cluster("V100, cpu"))
    for name in ("weight", "view", "nothing"):
        assert costs.compute_s[graph.op_name.index(name)].tolist() == [0.0, 0.0]


def test_efficiency_stretches_work_but_not_the_launch() -> None:
    graph = mixed_ops()
    matmul = graph.op_name.index("matmul")
    costs = roofline_costs(graph, parse_cluster("V100"), efficiency=0.5)
    assert costs.compute_s[matmul, 0] == pytest.approx(20e-3 + 5e-6)


def test_roofline_says_what_it_is() -> None:
    graph = mixed_ops()
    costs = roofline_costs(graph, parse_cluster("V100"))
    assert set(costs.origin.tolist()) == {Origin.ANALYTIC}
    assert set(costs.rel_error.tolist()) == {0.5}
    assert costs.transfer_s.tolist() == [BY_ROUTE] * graph.num_tensors
    assert not costs.issue_s.any()


@pytest.mark.parametrize("efficiency", [0.0, -1.0, 1.5, math.nan, math.inf])
def test_an_efficiency_that_is_no_share_is_refused(efficiency: float) -> None:
    with pytest.raises(CostError, match="efficiency"):
        roofline_costs(mixed_ops(), parse_cluster("V100"), efficiency=efficiency)


# ---- transfers


def two_hosts() -> Cluster:
    return parse_cluster("V100, A100 | H100 ; inter=100gbit")


def test_route_tables_hold_the_sum_of_latencies_and_the_slowest_rate() -> None:
    cluster = two_hosts()
    assert route_latency_s(cluster) == pytest.approx(
        np.array([[0, 10e-6, 14e-6], [10e-6, 0, 14e-6], [14e-6, 14e-6, 0]])
    )
    assert route_bytes_per_s(cluster).tolist() == [
        [np.inf, 15.75e9, 12.5e9],
        [15.75e9, np.inf, 12.5e9],
        [12.5e9, 12.5e9, np.inf],
    ]


def test_a_single_device_has_nothing_to_send() -> None:
    cluster = parse_cluster("cpu")
    assert route_latency_s(cluster).tolist() == [[0.0]]
    assert route_bytes_per_s(cluster).tolist() == [[np.inf]]


# ---- optimizer state


@pytest.mark.parametrize(
    ("optimizer", "shape", "expected"),
    [
        ("sgd", (10, 20), 0),
        ("momentum", (10, 20), 800),
        ("adam", (10, 20), 1600),
        ("AdamW", (10, 20), 1600),
        ("adafactor", (10, 20), 4 * 30),
        ("adafactor", (20,), 80),
        ("adafactor", (3, 10, 20), 4 * 3 * 30),  # three matrices
        ("adafactor", (), 4),
        ("adam", (), 8),
    ],
)
def test_state_of_a_float32_weight(optimizer: str, shape: tuple[int, ...], expected: int) -> None:
    assert state_bytes(shape, optimizer) == expected


@pytest.mark.parametrize(
    ("optimizer", "dtype", "expected"),
    [
        ("sgd", Dtype.BFLOAT16, 400),  # the master copy alone
        ("momentum", Dtype.FLOAT16, 800),
        ("adamw", Dtype.BFLOAT16, 1200),  # 4 + 4 + 4 an element
        ("adafactor", Dtype.BFLOAT16, 400 + 4 * 20),
        ("adamw", Dtype.FLOAT32, 800),  # no master copy of what is float32 already
        ("adamw", Dtype.FLOAT64, 1600),
        ("adamw", Dtype.INT8, 0),
    ],
)
def test_state_under_mixed_precision_for_100_elements(optimizer: str, dtype: Dtype, expected: int) -> None:
    assert state_bytes((10, 10), optimizer, precision="mixed", dtype=dtype) == expected


def test_state_has_the_dtype_of_the_weight_without_mixed_precision() -> None:
    assert state_bytes((100,), "adam", dtype=Dtype.BFLOAT16) == 400
    assert state_bytes((100,), "adam", dtype=Dtype.FLOAT64) == 1600


def test_state_is_what_torch_optimizers_really_hold() -> None:
    torch = pytest.importorskip("torch", reason="torch is the witness here")
    makers = {
        "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1),
        "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adafactor": torch.optim.Adafactor,
    }
    assert set(makers) == set(OPTIMIZERS)
    dtypes = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.float64: Dtype.FLOAT64}
    for name, maker in makers.items():
        for torch_dtype, dtype in dtypes.items():
            for shape in ((7,), (5, 3), (2, 5, 3)):
                weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch_dtype))
                optimizer = maker([weight])
                weight.grad = torch.ones_like(weight)
                optimizer.step()
                held = sum(
                    value.nbytes
                    for key, value in optimizer.state[weight].items()
                    if key != "step" and value is not None
                )
                assert state_bytes(shape, name, dtype=dtype) == held, (name, dtype, shape)


@pytest.mark.parametrize(("optimizer", "precision"), [("adamm", "fp32"), ("adam", "fp16"), ("", "fp32")])
def test_an_unknown_optimizer_or_precision_is_answered_with_the_known(optimizer: str, precision: str) -> None:
    with pytest.raises(UnknownNameError):
        state_bytes((1,), optimizer, precision=precision)
    with pytest.raises(UnknownNameError):
        with_optimizer(mixed_ops(), optimizer, precision=precision)


GPT2_BLOCK = [
    *[(768,)] * 4,  # two layer norms
    *[(768, 2304), (2304,), (768, 768), (768,)],  # attention
    *[(768, 3072), (3072,), (3072, 768), (768,)],  # feed forward
]
GPT2_SMALL = [(50257, 768), (1024, 768), *GPT2_BLOCK * 12, (768,), (768,)]


def parameters(shapes: list[tuple[int, ...]], dtype: Dtype = Dtype.FLOAT32) -> Graph:
    builder = GraphBuilder("parameters")
    for index, shape in enumerate(shapes):
        text = ",".join(map(str, shape))
        op = builder.op(
            f"p{index}",
            kind="param",
            phase=Phase.PARAM,
            signature=f"param {dtype.name.lower()}[{text}]",
            dtype=dtype,
        )
        builder.tensor(op, math.prod(shape) * dtype.itemsize, keep=True)
    return builder.build()


def test_adamw_keeps_8_bytes_beside_each_of_the_124_439_808_parameters_of_gpt2_small() -> None:
    graph = parameters(GPT2_SMALL)
    assert int(graph.tensor_bytes.sum()) == 4 * 124_439_808
    assert int(with_optimizer(graph, "adamw").resident_bytes.sum()) == (4 + 8) * 124_439_808
    assert int(with_optimizer(graph, "sgd").resident_bytes.sum()) == 4 * 124_439_808
    half = parameters(GPT2_SMALL, Dtype.BFLOAT16)
    assert (
        int(with_optimizer(half, "adamw", precision="mixed").resident_bytes.sum()) == (2 + 12) * 124_439_808
    )


def test_adafactor_keeps_rows_and_columns_of_gpt2_small() -> None:
    matrices = (50257 + 768) + (1024 + 768) + 12 * ((768 + 2304) + (768 + 768) + 2 * (768 + 3072))
    vectors = 12 * (4 * 768 + 2304 + 768 + 3072 + 768) + 2 * 768
    graph = with_optimizer(parameters(GPT2_SMALL), "adafactor")
    assert int(graph.resident_bytes.sum()) == 4 * (124_439_808 + matrices + vectors)


def test_without_a_signature_a_weight_is_a_vector_of_its_bytes() -> None:
    builder = GraphBuilder("plain")
    op = builder.op("w", phase=Phase.PARAM, dtype=Dtype.FLOAT16)
    tensor = builder.tensor(op, 200, keep=True)
    builder.tensor(op, 100, storage=tensor)  # a view is not counted again
    graph = builder.build()
    assert with_optimizer(graph, "adam").resident_bytes.tolist() == [200 + 400]  # 100 elements, 2 + 2 bytes
    assert with_optimizer(graph, "adam", precision="mixed").resident_bytes.tolist() == [200 + 1200]


def training_step(*, grouped: bool, reads_weight: bool) -> Graph:
    """A frozen weight and a trained one of 10 x 20 floats, forward, backward, update."""
    builder = GraphBuilder("step")
    group = 1 if grouped else -1
    frozen = builder.op("frozen", phase=Phase.PARAM, signature="param float32[5]")
    weight = builder.op("weight", phase=Phase.PARAM, signature="param float32[10,20]", group=group)
    forward = builder.op("forward", flops=1.0, resident_bytes=7)
    backward = builder.op("backward", phase=Phase.BACKWARD, mirror=forward, flops=1.0)
    update = builder.op("update", phase=Phase.UPDATE, group=group, bytes_moved=1)
    builder.use(builder.tensor(frozen, 20, keep=True), forward)
    value = builder.tensor(weight, 800, keep=True)
    builder.use(value, forward, backward, *([update] if reads_weight else []))
    builder.use(builder.tensor(forward, 40), backward)
    builder.use(builder.tensor(backward, 800), update)
    return builder.build()


@pytest.mark.parametrize(("grouped", "reads_weight"), [(True, True), (True, False), (False, True)])
def test_a_trained_weight_has_state_and_a_frozen_one_has_none(grouped: bool, reads_weight: bool) -> None:
    graph = with_optimizer(training_step(grouped=grouped, reads_weight=reads_weight), "adam")
    held = dict(zip(graph.op_name, graph.resident_bytes.tolist(), strict=True))
    assert held == {"frozen": 20, "weight": 800 + 1600, "forward": 7, "backward": 0, "update": 0}


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("sgd", 3 * 800),  # weight read and written, gradient read
        ("momentum", 3 * 800 + 2 * 800),  # and the buffer read and written
        ("adam", 3 * 800 + 2 * 1600),
        ("adafactor", 3 * 800 + 2 * 120),
    ],
)
def test_an_update_moves_weight_gradient_and_state(optimizer: str, expected: int) -> None:
    for reads_weight in (True, False):
        graph = with_optimizer(training_step(grouped=True, reads_weight=reads_weight), optimizer)
        moved = dict(zip(graph.op_name, graph.bytes_moved.tolist(), strict=True))
        assert moved["update"] == expected
        assert moved["forward"] == 0


def test_a_second_optimizer_replaces_the_first_and_the_graph_given_is_untouched() -> None:
    graph = training_step(grouped=True, reads_weight=True)
    before = graph.digest
    twice = with_optimizer(with_optimizer(graph, "adam"), "momentum")
    assert twice.digest == with_optimizer(graph, "momentum").digest
    assert graph.digest == before


def test_a_weight_counted_in_resident_bytes_stays_counted() -> None:
    builder = GraphBuilder("elsewhere")
    op = builder.op("w", phase=Phase.PARAM, resident_bytes=400)
    builder.tensor(op, 400, storage=NO_STORAGE)
    assert with_optimizer(builder.build(), "adam").resident_bytes.tolist() == [400 + 800]


def test_update_ops_of_one_large_group_are_not_charged_for_each_others_weights() -> None:
    builder = GraphBuilder("layer")
    for index in range(3):
        op = builder.op(f"w{index}", phase=Phase.PARAM, group=1)
        builder.tensor(op, 400, keep=True)
    for index in range(3):
        builder.op(f"u{index}", phase=Phase.UPDATE, group=1, bytes_moved=11)
    graph = with_optimizer(builder.build(), "adam")
    assert graph.resident_bytes.tolist() == [400 + 800] * 3 + [0] * 3
    assert graph.bytes_moved.tolist() == [0] * 3 + [11] * 3  # which is whose is not known: left alone


def test_a_signature_of_absurd_size_is_refused_and_an_odd_one_is_passed_over() -> None:
    graph = parameters([(4, 4)])
    absurd = dataclasses.replace(graph, signature_table=("param float32[999999999999,999999999999]",))
    with pytest.raises(GraphError, match="check its signature"):
        with_optimizer(absurd, "adam")
    for text in ("param float99[3]", "<b>\n", "param float32[1,]", "param float32[-3]", "9" * 5000):
        odd = dataclasses.replace(graph, signature_table=(text,))
        assert with_optimizer(odd, "adam").resident_bytes.tolist() == [(4 + 8) * 16]
