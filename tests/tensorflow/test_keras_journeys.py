"""fit, checkpoints, SavedModels and loops of the user's own on a placed model; and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loadmaster as lm
import tensorflow as tf
from loadmaster.core.errors import ClusterError, InputError, PlanError
from loadmaster.graph.models import CaptureOptions, capture_model
from tests.tensorflow.small_models import DEVICES, build, capture, layers, place_randomly, weights_of


def test_fit_with_a_smaller_last_batch_trains_as_the_unplaced_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((40, 24)).astype(np.float32), rng.integers(0, 10, 40).astype(np.int32)
    plain, batch = build("mlp")
    expected = plain.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
    model, _ = build("mlp")
    placed = place_randomly(capture(model, batch), 3)
    assert placed.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"] == expected
    assert weights_of(model) == weights_of(plain)
    homes = {weight.value.device.rpartition("device:")[2] for weight in model.trainable_variables}
    assert len(homes) > 1
    assert np.array_equal(placed.predict(x, verbose=0), plain.predict(x, verbose=0))
    _check_files(placed, plain, x, tmp_path)


def _check_files(placed: Any, plain: Any, x: Any, folder: Path) -> None:
    """Weights, checkpoints and a SavedModel are the model's own."""
    placed.save_weights(folder / "w.weights.h5")
    other, _ = build("mlp")
    other.optimizer.build(other.trainable_variables)
    other.load_weights(folder / "w.weights.h5")
    assert np.array_equal(other.predict(x, verbose=0), plain.predict(x, verbose=0))
    path = tf.train.Checkpoint(model=placed.model).save(str(folder / "checkpoint"))
    before = weights_of(placed.model)
    for variable in placed.model.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    tf.train.Checkpoint(model=placed.model).restore(path)
    assert weights_of(placed.model) == before
    placed.export(str(folder / "saved"), verbose=False)
    loaded = tf.saved_model.load(str(folder / "saved"))
    served = loaded.serve(tf.constant(x))
    assert np.allclose(served, plain.predict(x, verbose=0), atol=1e-6)


def test_a_loop_of_the_users_own_trains_as_before() -> None:
    def make() -> tuple[Any, Any]:
        weight = tf.Variable(tf.ones((4, 3)), name="w")
        optimizer = tf.keras.optimizers.SGD(0.1)

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                total = tf.reduce_mean(tf.square(tf.matmul(x, weight)))
            optimizer.apply_gradients([(tape.gradient(total, weight), weight)])
            return total

        return step, weight

    x = tf.constant(np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32))
    plain, expected_weight = make()
    expected = [float(plain(x)) for _ in range(4)]
    step, weight = make()
    placed = lm.place(step, (x,), devices=DEVICES, budget="20x", costs="roofline")
    assert [float(placed(x)) for _ in range(4)] == expected
    assert np.array_equal(weight.numpy(), expected_weight.numpy())
    assert "3 devices" in placed.explain()


def test_a_loop_over_tensors_stays_one_op_and_is_noted() -> None:
    @tf.function
    def step(x: Any) -> Any:
        for _ in tf.range(5):
            x = tf.matmul(x, x)
        return x

    x = tf.eye(4) * 0.5
    captured = capture(step, (x,))
    assert any(kind.endswith("While") for kind in captured.graph.op_kind)
    assert any("control flow" in note for note in captured.graph.notes)
    placed = place_randomly(captured, 1, "cpu#0-1GB, cpu#1-1GB")
    assert np.array_equal(placed(x), step(x))


def test_two_inputs_and_outputs_and_inference() -> None:
    one, other = tf.keras.Input((4,), name="one"), tf.keras.Input((3,), name="other")
    both = layers.Concatenate()([layers.Dense(5)(one), other])
    model = tf.keras.Model({"one": one, "other": other}, [layers.Dense(2)(both), layers.Dense(1)(both)])
    given = {"one": tf.ones((2, 4)), "other": tf.ones((2, 3))}
    expected = model(given, training=False)
    placed = lm.place(model, given, devices=DEVICES, budget="20x", costs="roofline")
    for out, wanted in zip(placed(given), expected, strict=True):
        assert np.array_equal(out, wanted)


def test_a_model_with_a_train_step_of_its_own() -> None:
    class Own(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - y))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"own": loss}

    def make() -> Any:
        tf.keras.utils.set_random_seed(2)
        model = Own()
        model.compile(optimizer="sgd", loss="mse", jit_compile=False)
        return model

    batch = (np.ones((4, 3), np.float32), np.ones((4, 1), np.float32))
    plain = make()
    expected = plain.fit(*batch, epochs=3, verbose=0).history["own"]
    placed = place_randomly(capture(make(), batch), 0)
    assert placed.fit(*batch, epochs=3, verbose=0).history["own"] == expected


def test_a_step_may_give_the_gradient_of_an_embedding() -> None:
    table = tf.Variable(np.random.default_rng(1).standard_normal((10, 4)).astype(np.float32))

    @tf.function
    def step(at: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.gather(table, at)))
        return tape.gradient(loss, table)

    at = tf.constant([1, 2, 2, 5])
    expected = step(at)
    found = place_randomly(capture(step, (at,)), 0)(at)
    assert isinstance(found, tf.IndexedSlices)
    assert np.array_equal(found.values, expected.values)
    assert np.array_equal(found.indices, expected.indices)


def test_a_saved_plan_runs_a_model_that_is_built_later(tmp_path: Path) -> None:
    model, batch = build("mlp")
    problem = lm.problem(capture(model, batch).graph, DEVICES)
    path = tmp_path / "plan.json"
    lm.save(lm.plan(problem, algorithm="round_robin", budget="1x"), path)
    plain, _ = build("mlp")
    expected = plain.train_on_batch(*batch)
    again, _ = build("mlp")
    placed = lm.place(again, str(path))
    assert placed.train_on_batch(*batch) == expected
    other = tf.keras.Sequential([tf.keras.Input((24,)), layers.Dense(10)])
    other.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    with pytest.raises(PlanError, match="another version of"):
        lm.place(other, str(path)).train_on(*batch)


def test_a_model_that_is_compiled_again_must_be_placed_again() -> None:
    model, batch = build("mlp")
    placed = place_randomly(capture(model, batch), 0)
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    for train in (placed.train_on, placed.train_on_batch, placed.fit):
        with pytest.raises(InputError, match=r"compiled again .* place the model again"):
            train(*batch)
    again = place_randomly(capture(model, batch), 0)
    assert again.train_on(*batch)["loss"] > 0


def test_a_saved_model_folder_is_planned(tmp_path: Path) -> None:
    model, _ = build("mlp")
    model.export(str(tmp_path / "saved"), verbose=False)
    graph = capture_model(str(tmp_path / "saved"), CaptureOptions(batch=4))
    assert "float32[4,24]" in "".join(graph.signature_table)
    assert not set(graph.op_kind) & {"PartitionedCall", "StatefulPartitionedCall"}


def test_bad_input_is_refused_with_a_remedy() -> None:
    model, (x, y) = build("mlp")

    def eager(x: Any) -> Any:
        return tf.constant(x.numpy())

    @tf.function(jit_compile=True)
    def compiled(x: Any) -> Any:
        return x + 1

    cases: list[tuple[Any, Any, str]] = [
        (tf.function(eager), (x,), "tf.function refused 'eager'.*numpy"),
        (compiled, (x,), "jit_compile=False"),
        (tf.function(lambda x: compiled(x)), (x,), "jit_compile=False"),
        (tf.function(eager), (tf.ragged.constant([[1], [2, 3]]),), "ragged"),
        (tf.function(eager), (tf.sparse.eye(2),), "sparse"),
        (type(model), (x, y), "is a class"),
        (model, (), "needs example inputs"),
        (model, (tf.TensorSpec((None, 24)), y), r"float32\(None, 24\), whose size is not known"),
        (model, tf.data.Dataset.from_tensors((x, y)), r"give one batch of it: next\(iter\(dataset\)\)"),
    ]
    for wrong, args, words in cases:
        with pytest.raises(InputError, match=words):
            lm.place(wrong, args, devices=DEVICES, costs="roofline")
    model._jit_compile = True  # Keras itself refuses it where ops must be deterministic, as here
    with pytest.raises(InputError, match=r"jit_compile=False.*Keras chooses XLA"):
        lm.place(model, (x, y), devices=DEVICES, costs="roofline")
    model._jit_compile = False
    with pytest.raises(ClusterError, match="set_logical_device_configuration"):
        lm.place(model, (x, y), devices=", ".join(f"cpu#{i}-1GB" for i in range(4)), costs="roofline")
    with pytest.raises(InputError, match="verify"):
        lm.place(model, (x, y), devices=DEVICES, verify="first-step")


def test_an_unknown_op_type_is_costed_by_bytes_and_counted() -> None:
    graph = capture(tf.function(lambda x: tf.linalg.cholesky(x)), (tf.eye(8),)).graph
    assert any("Cholesky (1)" in note for note in graph.notes)
    at = graph.op_kind.index("Cholesky")
    assert (graph.flops[at], graph.bytes_moved[at]) == (0, 2 * 8 * 8 * 4)
