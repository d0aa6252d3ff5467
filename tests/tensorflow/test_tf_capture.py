"""What a captured TensorFlow step says: phases, weights, ties, flops as tf.profiler counts them, names."""

from functools import cache
from typing import Any

import numpy as np
import pytest

import tensorflow as tf
from loadmaster.core.graph import NO_MIRROR, Graph, Phase
from loadmaster.cost.keys import collect_keys
from loadmaster.cost.signature import parse_signature
from loadmaster.cost.timed.tensorflow_timing import make_function, time_signature
from loadmaster.graph.differences import list_differences
from loadmaster.graph.tf_capture.canonical import canonical_names, name_additions
from loadmaster.graph.tf_capture.op_work import op_flops
from tests.tensorflow.small_models import build, capture


@cache
def _captured(name: str, optimizer: str = "sgd") -> tuple[Any, Graph]:
    model, batch = build(name, optimizer)
    return model, capture(model, batch).graph


def test_slots_of_adam_are_resident_beside_their_weights() -> None:
    model, graph = _captured("mlp", "adam")
    held = graph.resident_bytes[graph.phase == Phase.PARAM]
    sizes = [3 * weight.value.shape.num_elements() * 4 for weight in model.trainable_variables]
    assert sorted(held[held > 16].tolist()) == sorted(sizes)


@pytest.mark.parametrize("name", ["mlp", "lstm", "transformer", "resnet"])
def test_phases_and_mirrors(name: str) -> None:
    _, graph = _captured(name)
    phases = dict(zip(graph.op_name, graph.phase.tolist(), strict=True))
    for op, phase in phases.items():
        if op.startswith("sgd/Assign"):
            assert phase == Phase.UPDATE, op
        if "MatMul" in op and op.startswith("gradient_tape"):
            assert phase == Phase.BACKWARD, op
        if op.split("/")[-1] in ("Relu", "Softmax", "While") and not op.startswith("gradient_tape"):
            assert phase == Phase.FORWARD, op
    mirrored = graph.mirror[graph.mirror != NO_MIRROR]
    assert len(mirrored)
    assert (graph.phase[mirrored] == Phase.FORWARD).all()


def test_whoever_touches_a_variable_is_tied_to_it() -> None:
    _, graph = _captured("mlp", "adam")
    for tensor, user in zip(graph.use_tensor, graph.use_op, strict=True):
        maker = graph.tensor_op[tensor]
        if graph.op_kind[maker] == "variable":
            assert graph.group[maker] == graph.group[user] >= 0


def test_the_same_model_built_later_has_the_same_graph() -> None:
    one, other = (capture(*build("mlp", "adam")).graph for _ in range(2))
    assert list_differences(one, other) == []
    assert one.op_name == other.op_name


def test_names_are_counted_within_their_scope() -> None:
    names = ["m_3/dense_7_1/MatMul", "m_3/dense_8_1/MatMul", "gradient_tape/m_3/dense_8_1/MatMul"]
    assert list(canonical_names(names).values()) == [
        "m/dense/MatMul",
        "m/dense_1/MatMul",
        "gradient_tape/m/dense_1/MatMul",
    ]


def test_what_the_optimiser_adds_is_named_by_what_it_was_made_of() -> None:
    known = {"m_3/dense_7_1/MatMul": "m/dense/MatMul", "m_3/dense_8_1/add": "m/dense_1/add"}
    added = ["ConstantFolding/m_3/dense_8_1/add-folded-1", "m_3/dense_7_1/MatMul/new", "m_3/dense_7_1/Cast_2"]
    assert name_additions([*added, "alone"], known) == {
        "ConstantFolding/m_3/dense_8_1/add-folded-1": "ConstantFolding/m/dense_1/add-folded-1",
        "m_3/dense_7_1/MatMul/new": "m/dense/MatMul/new",
        "m_3/dense_7_1/Cast_2": "m/dense/Cast_2",
        "alone": "alone",
    }


def test_flops_are_those_of_the_profiler() -> None:
    x, image = tf.ones((3, 8)), tf.ones((2, 8, 8, 4))

    def ops() -> list[Any]:
        convolved = tf.nn.conv2d(image, tf.ones((3, 3, 4, 6)), 2, "SAME")
        return [
            tf.matmul(x, x, transpose_b=True),
            tf.matmul(tf.ones((5, 3, 8)), tf.ones((5, 8, 7))),
            convolved,
            tf.compat.v1.nn.conv2d_backprop_filter(image, (3, 3, 4, 6), convolved, [1, 2, 2, 1], "SAME"),
            tf.nn.depthwise_conv2d(image, tf.ones((3, 3, 4, 2)), [1, 1, 1, 1], "SAME"),
            tf.nn.bias_add(x, tf.ones(8)),
            x + x,
            x * x,
            tf.nn.relu(x),
            tf.nn.max_pool2d(image, 3, 2, "SAME"),
            tf.nn.avg_pool2d(image, 2, 2, "SAME"),
        ]

    with tf.Graph().as_default() as graph, tf.device("CPU:0"):
        x, image = (
            tf.compat.v1.placeholder(tf.float32, (3, 8)),
            tf.compat.v1.placeholder(tf.float32, (2, 8, 8, 4)),
        )
        made = [tensor.op for tensor in ops()]
        options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
        options["output"] = "none"
        found = tf.compat.v1.profiler.profile(graph, cmd="scope", options=options)
    counted = {child.name: child.float_ops for child in _all(found)}
    compared = [op for op in made if counted.get(op.name)]
    assert {op.type for op in compared} >= {
        "MatMul",
        "BatchMatMulV2",
        "Conv2D",
        "Conv2DBackpropFilter",
        "BiasAdd",
    }
    assert {op.type: op_flops(op) for op in compared} == {op.type: counted[op.name] for op in compared}


def _all(node: Any) -> Any:
    for child in node.children:
        yield child
        yield from _all(child)


def test_ops_are_timed_on_their_own() -> None:
    keys = collect_keys(_captured("mlp")[1])
    chosen = [key for key in keys.text if key.startswith(("tf.MatMul", "tf.Sum", "tf.BiasAddGrad"))]
    assert len(chosen) >= 3
    for key in chosen:
        assert time_signature(key)[0] > 0


def test_a_kept_activation_lives_until_its_gradient_is_made() -> None:
    _, graph = _captured("mlp")
    users = np.bincount(graph.use_tensor, minlength=graph.num_tensors)
    relu = next(at for at, name in enumerate(graph.op_name) if name.endswith("/Relu"))
    assert users[np.flatnonzero(graph.tensor_op == relu)[0]] >= 2


def test_a_timed_function_runs_every_copy_and_gives_one_tensor() -> None:
    signature = parse_signature("tf.Mul.default float32[8] float32[8]")
    assert signature is not None
    once, few = make_function(signature, 1, 9)
    often, many = make_function(signature, 9, 9)
    assert len(few) == len(many) == 18  # taking what one call costs from the other leaves ops alone
    for function, copies in ((once, 1), (often, 9)):
        assert [op.type for op in function.graph.get_operations()].count("Mul") == copies
        assert len(function.outputs) == 1
    last = next(op for op in often.graph.get_operations() if op.type == "Mul" and op.name == "Mul_8")
    assert [op.type for op in last.control_inputs] == ["Mul"]  # one after the other
