"""Other models train on random plans as they do unplaced: recurrent ones, several inputs, mixed precision."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tensorflow as tf
from tests.tensorflow.small_models import capture, layers, place_randomly, weights_of

_STEPS = 3
_CLASSES = np.array([0, 1, 2, 0], np.int32)
Made = tuple[Any, Any]


def _compiled(model: Any, optimizer: Any = "adam") -> Any:
    model.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    return model


def _gru() -> Made:
    model = tf.keras.Sequential(
        [
            tf.keras.Input((6,), dtype="int32"),
            layers.Embedding(20, 8, mask_zero=True),
            layers.Bidirectional(layers.GRU(5, return_sequences=True)),
            layers.GRU(7, dropout=0.1),
            layers.Dense(3, activation="softmax"),
        ]
    )
    return _compiled(model), (np.arange(24, dtype=np.int32).reshape(4, 6) % 5, _CLASSES)


def _two_inputs_and_outputs() -> Made:
    one, other = tf.keras.Input((4,), name="one"), tf.keras.Input((3,), name="other")
    both = layers.Concatenate()([layers.Dense(5)(one), other])
    model = tf.keras.Model(
        [one, other], {"p": layers.Dense(2, name="p")(both), "q": layers.Dense(1, name="q")(both)}
    )
    model.compile("adam", {"p": "mse", "q": "mae"}, jit_compile=False)
    x = [np.ones((4, 4), np.float32), np.ones((4, 3), np.float32)]
    return model, (x, {"p": np.ones((4, 2), np.float32), "q": np.ones((4, 1), np.float32)})


class Own(tf.keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(8, activation="swish"), layers.Dense(3, activation="softmax")
        self.normal, self.drop = layers.BatchNormalization(), layers.Dropout(0.3)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.last(self.drop(self.normal(self.first(x), training=training), training=training))


def _subclassed_with_sample_weights() -> Made:
    schedule = tf.keras.optimizers.schedules.CosineDecay(0.01, 10)
    batch = (np.ones((4, 6), np.float32), _CLASSES, np.array([1, 0.5, 1, 2], np.float32))
    return _compiled(Own(), tf.keras.optimizers.RMSprop(schedule, clipnorm=1.0)), batch


def _tokens_and_features() -> Made:
    ids, features = tf.keras.Input((7,), dtype="int32"), tf.keras.Input((4,))
    words = layers.Flatten()(layers.Embedding(50, 6)(ids))
    both = layers.Concatenate()([words, layers.Dense(8, activation="tanh")(features)])
    out = layers.Dense(3, activation="softmax")(layers.Dropout(0.2)(layers.Dense(16)(both)))
    x = [np.arange(28, dtype=np.int32).reshape(4, 7), np.ones((4, 4), np.float32)]
    return _compiled(tf.keras.Model([ids, features], out), "rmsprop"), (x, _CLASSES)


class ClippedAutoencoder(tf.keras.Model):  # type: ignore[misc]
    """A training step of its own: a penalty on the weights, clipped gradients, a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers.Dense(6, activation="relu"), layers.Dense(4)
        self.mean = tf.keras.metrics.Mean(name="loss")

    def call(self, x: Any, training: Any = None) -> Any:
        return self.decoder(self.encoder(x))

    def train_step(self, data: Any) -> Any:
        x, _ = data
        with tf.GradientTape() as tape:
            penalty = tf.add_n([tf.nn.l2_loss(weight) for weight in self.trainable_variables])
            loss = tf.reduce_mean(tf.abs(self(x, training=True) - x)) + 1e-3 * penalty
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 1.0)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}


def _clipped_autoencoder() -> Made:
    model = ClippedAutoencoder()
    model(np.zeros((1, 4), np.float32))  # its weights are made here: the step reads them
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.9)
    model.compile(tf.keras.optimizers.AdamW(schedule, weight_decay=0.01), jit_compile=False)
    x = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
    return model, (x, x)


def _mixed(policy: str) -> Made:
    tf.keras.config.set_dtype_policy(policy)
    try:
        given = tf.keras.Input((6,))
        hidden = layers.LayerNormalization()(layers.Dense(16, activation="relu")(given))
        out = layers.Dense(3, activation="softmax", dtype="float32")(hidden)
        return _compiled(tf.keras.Model(given, out)), (np.ones((4, 6), np.float32), _CLASSES)
    finally:
        tf.keras.config.set_dtype_policy("float32")


def _adversaries() -> Made:
    """Two networks with an optimizer each and one tape: gradients of several parts are added up."""
    model = Adversaries()
    model.compile(tf.keras.optimizers.Adam(0.01), tf.keras.optimizers.Adam(0.02))
    x = np.random.default_rng(0).standard_normal((16, 10)).astype(np.float32)
    return model, (x, x)


class Adversaries(tf.keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.maker = tf.keras.Sequential(
            [tf.keras.Input((4,)), layers.Dense(8, activation="relu"), layers.Dense(10)]
        )
        self.judge = tf.keras.Sequential(
            [tf.keras.Input((10,)), layers.Dense(8, activation="relu"), layers.Dense(1)]
        )
        self.seed = tf.keras.random.SeedGenerator(3)
        self.built = True

    def compile(self, maker: Any, judge: Any) -> None:
        super().compile(optimizer=maker, jit_compile=False)
        self.judge_optimizer = judge
        maker.build(self.maker.trainable_variables)
        judge.build(self.judge.trainable_variables)

    def train_step(self, data: Any) -> Any:
        x, _ = data
        compare = tf.keras.losses.BinaryCrossentropy(from_logits=True)
        with tf.GradientTape(persistent=True) as tape:
            made = self.maker(tf.keras.random.normal((16, 4), seed=self.seed))
            real, fake = self.judge(x), self.judge(made)
            judged = compare(tf.ones_like(real), real) + compare(tf.zeros_like(fake), fake)
            fooled = compare(tf.ones_like(fake), fake)
        for optimizer, loss, weights in (
            (self.judge_optimizer, judged, self.judge.trainable_variables),
            (self.optimizer, fooled, self.maker.trainable_variables),
        ):
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": fooled, "judged": judged}


def _bfloat16_images() -> Made:
    tf.keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        given = tf.keras.Input((8, 8, 3))
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(6, 3)(given)))
        x = layers.GlobalAveragePooling2D()(layers.Conv2D(6, 3, activation="relu")(x))
        out = layers.Dense(3, activation="softmax", dtype="float32")(x)
        images = np.random.default_rng(0).standard_normal((4, 8, 8, 3)).astype(np.float32)
        return _compiled(tf.keras.Model(given, out)), (images, _CLASSES)
    finally:
        tf.keras.config.set_dtype_policy("float32")


def _clipped_recurrence() -> Made:
    model = tf.keras.Sequential(
        [
            tf.keras.Input((6,), dtype="int32"),
            layers.Embedding(20, 8),
            layers.GRU(5, return_sequences=True, unroll=True),
            layers.SimpleRNN(5),
            layers.Dense(3, activation="softmax"),
        ]
    )
    batch = (np.arange(24, dtype=np.int32).reshape(4, 6) % 5, _CLASSES)
    return _compiled(model, tf.keras.optimizers.Nadam(0.01, global_clipnorm=1.0)), batch


def _check(build: Callable[[], Made]) -> None:
    def make() -> Made:
        tf.keras.backend.clear_session()  # TensorFlow adds up gradients in the order of their layers' names
        tf.keras.utils.set_random_seed(7)
        return build()

    plain, batch = make()
    step = tf.function(lambda *data: plain.train_step(data))
    expected = [float(step(*tf.nest.map_structure(tf.constant, batch))["loss"]) for _ in range(_STEPS)]
    model, _ = make()
    placed = place_randomly(capture(model, batch), 1)
    assert [float(placed.train_on(*batch)["loss"]) for _ in range(_STEPS)] == expected
    assert weights_of(model) == weights_of(plain)


@pytest.mark.slow
def test_a_float16_model_with_a_loss_scale_trains_as_before() -> None:
    _check(lambda: _mixed("mixed_float16"))  # its branches are functions that only the optimiser knows


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        _gru,
        _two_inputs_and_outputs,
        _subclassed_with_sample_weights,
        _tokens_and_features,
        _clipped_autoencoder,
        _clipped_recurrence,
        _adversaries,
        _bfloat16_images,
    ],
)
def test_other_models_train_as_before(build: Callable[[], Made]) -> None:
    _check(build)


@pytest.mark.slow
def test_bfloat16_trains_as_before() -> None:
    _check(lambda: _mixed("mixed_bfloat16"))


@pytest.mark.slow
def test_fit_takes_several_inputs_and_outputs() -> None:
    histories = []
    for place in (False, True):
        tf.keras.utils.set_random_seed(7)
        model, (x, y) = _two_inputs_and_outputs()
        runs = place_randomly(capture(model, (x, y)), 0) if place else model
        histories.append(runs.fit(x, y, batch_size=4, epochs=3, verbose=0).history)
    assert histories[0] == histories[1]


def test_a_tf_while_loop_trains_as_before() -> None:
    """TensorFlow fuses what a loop runs, and knows the shapes of its variables; so do its bodies here."""
    drawn = np.random.default_rng(5).standard_normal((6, 6)).astype(np.float32) * 0.4

    def make() -> Any:
        weight, bias = tf.Variable(drawn), tf.Variable(0.1 * tf.ones(6))

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                for _ in tf.range(3):
                    x = tf.tanh(x @ weight + bias)
                loss = tf.reduce_mean(tf.square(x))
            for held, gradient in zip((weight, bias), tape.gradient(loss, (weight, bias)), strict=True):
                held.assign_sub(0.1 * gradient)
            return loss

        return step, weight, bias

    x = tf.constant(np.random.default_rng(6).standard_normal((4, 6)).astype(np.float32))
    plain, *expected = make()
    losses = [float(plain(x)) for _ in range(4)]
    step, *held = make()
    placed = place_randomly(capture(step, (x,)), 0)
    assert [float(placed(x)) for _ in range(4)] == losses
    assert [one.numpy().tobytes() for one in held] == [one.numpy().tobytes() for one in expected]
