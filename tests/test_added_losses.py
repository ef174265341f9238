"""Losses that layers add: in float32, from 16-bit activations; told of where these are infinite."""

import contextlib
import weakref

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, MODES, Subclassed, differentiated, eager_and_graph, made, ours
from tests.models import compiled_model

X = np.full([4, 8], 100.0, "float32")
HOW = [{"run_eagerly": True}, {"jit_compile": False}, {"jit_compile": True}]


class Adds(tf.keras.layers.Layer):
    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x):
        self.add_loss(tf.reduce_sum(tf.matmul(x, 2 * x, transpose_b=True)) * self.factor)
        return x


def fit(factor, policy, mode, x=X):
    with keras_mp.policy_scope(policy):
        layers = Adds(factor, name="adds"), tf.keras.layers.Dense(1)
        model = compiled_model(*layers, inputs=8, **mode)
        return model.fit(x, x[:, :1], epochs=2, verbose=0).history["loss"]


@pytest.mark.parametrize("mode", HOW[:2], ids=["eager", "graph"])
def test_an_infinite_loss_is_told_of_once(mode):
    with pytest.warns(keras_mp.MixedPrecisionWarning, match="'adds' adds a loss") as warned:
        fit(1.0, "mixed_float16", mode)
    assert len(ours(warned)) == 1


@pytest.mark.parametrize("mode", HOW, ids=["eager", "graph", "jit"])
def test_a_finite_loss_and_one_of_another_dtype_are_not_told_of(mode):
    for factor, policy in ((0.01, "mixed_float16"), (1e6, "mixed_bfloat16")):
        assert np.isfinite(fit(factor, policy, mode, X / 10)).all()


CROSS_ENTROPIES = {
    "BinaryCrossentropy": lambda p: tf.keras.losses.BinaryCrossentropy()(tf.ones_like(p), p),
    "binary_crossentropy": lambda p: tf.keras.losses.binary_crossentropy(tf.ones_like(p), p),
    "SparseCategoricalCrossentropy": lambda p: tf.keras.losses.SparseCategoricalCrossentropy()(
        tf.zeros([4]), p
    ),
    "categorical_crossentropy": lambda p: tf.keras.losses.categorical_crossentropy(
        tf.one_hot([0] * 4, 2, dtype=p.dtype), p
    ),
}


@pytest.mark.parametrize("mode", HOW[:2], ids=["eager", "graph"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", list(CROSS_ENTROPIES))
def test_cross_entropies_of_keras_know_the_logits(name, policy, mode):
    activation = "sigmoid" if name.lower().startswith("binary") else "softmax"

    class Adds(tf.keras.layers.Layer):
        def build(self, _):
            self.slope = self.add_weight(name="slope", shape=[], initializer="ones")

        def call(self, x):
            probabilities = tf.keras.activations.get(activation)(self.slope * x)
            self.add_loss(tf.reduce_mean(CROSS_ENTROPIES[name](probabilities)))
            return x

    def losses(policy):
        with keras_mp.policy_scope(policy):
            model = compiled_model(Adds(), inputs=2, loss=None, **mode)
        x = np.full([4, 2], [-24.0, 24.0], "float32")
        return model.fit(x, epochs=3, verbose=0).history["loss"]

    # Sure and wrong: a probability is 1, and its own gradient 0.
    control = losses("float32")
    assert control[2] < 0.99 * control[0]
    np.testing.assert_allclose(losses(policy), control, rtol=0.01)


@tf.custom_gradient
def reversed_gradient(x):
    return tf.identity(x), lambda upstream: -upstream


def wide(value):
    return tf.cast(value, tf.float32)


# Losses of the activations `a` and `b` and the weight `w`, and of the same in float32.
LOSSES = {
    "squared error": lambda a, b, w: tf.reduce_mean((a - b) ** 2),
    "divergence": lambda a, b, w: -0.5 * tf.reduce_mean(1 + a - tf.square(b) - tf.exp(a)),
    "cross entropy": lambda a, b, w: tf.reduce_mean(
        tf.nn.softmax_cross_entropy_with_logits(tf.stop_gradient(tf.nn.softmax(a)), b)
    ),
    "moves": lambda a, b, w: tf.reduce_sum(tf.stack(tf.unstack(tf.concat([a, b], 1), axis=1)[1:])),
    "numbers": lambda a, b, w: 0.1 * tf.reduce_mean((a - 3.3) ** 2) + tf.reduce_mean(b) / 0.7,
    "weights": lambda a, b, w: tf.reduce_sum(tf.square(w)) + tf.reduce_mean(tf.abs(a)),
    "counts": lambda a, b, w: tf.reduce_sum(a / b) / tf.cast(tf.size(a) + 1257, a.dtype),
    "several": lambda a, b, w: [tf.norm(a), wide(tf.reduce_max(b)) / 3],
    "another gradient": lambda a, b, w: tf.reduce_mean(reversed_gradient(a) * b),
}


class AddsLosses(tf.keras.layers.Layer):
    def __init__(self, loss, is_wide):
        super().__init__()
        self.loss, self.is_wide = loss, is_wide
        self.inner = [tf.keras.layers.Dense(9), tf.keras.layers.Dense(9)]

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(7,), initializer="ones")

    def call(self, x):
        a, b, w = *(inner(x) for inner in self.inner), tf.convert_to_tensor(self.w)
        if self.is_wide:
            a, b, w = wide(a), wide(b), wide(w)
        self.add_loss(self.loss(a, b, w))
        return x


@pytest.mark.parametrize(("name", "mode", "dtype"), eager_and_graph(LOSSES))
def test_a_loss_is_computed_in_float32_from_16_bit_activations(name, mode, dtype):
    results = []
    for is_wide in (False, True):
        layer = made(lambda: AddsLosses(LOSSES[name], is_wide), f"mixed_{dtype}")
        layer(X)

        @MODES[mode]
        def run(x):
            losses_of_call = lambda: [layer(x), *layer.losses][1:]  # noqa: E731
            return differentiated(losses_of_call, layer.trainable_variables)

        results.append(run(tf.constant(X / 100)))
    (losses, gradients), (expected, of_expected) = results
    for loss, right in zip(losses, expected, strict=True):
        assert loss.dtype == tf.float32
        np.testing.assert_allclose(loss, right, rtol=1e-5)
    for gradient, right in zip(gradients, of_expected, strict=True):
        assert (gradient is None) == (right is None)
        if gradient is not None:
            np.testing.assert_allclose(gradient, right, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("mode", HOW, ids=["eager", "graph", "jit"])
def test_fit_and_evaluate_return_a_float32_loss_of_a_model_that_adds_it(mode):
    class Adds(Subclassed):
        def call(self, x):
            y = super().call(x)
            self.add_loss(tf.reduce_mean((y - 333.0) ** 2))
            return y

    with keras_mp.policy_scope("mixed_bfloat16"):
        model = Adds(tf.keras.layers.Dense(1))
    model.compile("sgd", **mode)
    loss = model.evaluate(X, verbose=0)
    expected = np.mean((model.layers[0](X).numpy().astype("float32") - 333.0) ** 2)
    # XLA of older versions of TensorFlow does not round `y` to bfloat16.
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(model.fit(X, verbose=0).history["loss"], [expected], rtol=1e-4)


@pytest.mark.skipif(IS_KERAS_3, reason="Keras 3 has no symbolic losses.")
def test_a_symbolic_loss_is_computed_in_float32():
    with keras_mp.policy_scope("mixed_float16"):
        x = tf.keras.Input([8])
        h = tf.keras.layers.Dense(3)(x)
        model = tf.keras.Model(x, tf.keras.layers.Dense(1)(h))
        model.add_loss(tf.reduce_mean((h - 0.5) ** 2) / 4)
    model.compile("sgd")
    hidden = model.layers[1](X / 100).numpy().astype("float32")
    expected = np.mean((hidden - 0.5) ** 2) / 4
    np.testing.assert_allclose(model.evaluate(X / 100, verbose=0), expected, rtol=1e-5)


def test_losses_of_other_layers_stay_as_they_are():
    policy = tf.keras.mixed_precision.Policy("mixed_bfloat16")
    with keras_mp.policy_scope("mixed_bfloat16"):
        AddsLosses(LOSSES["squared error"], False)(X)
    with keras_mp.policy_scope("float32"):
        layer = Adds(1.0, dtype=policy)
    layer(X)
    assert layer.losses[0].dtype == tf.bfloat16


class Keeps(tf.keras.layers.Layer):
    """It keeps a tensor, as a tape does, but not the one that this was computed from."""

    def call(self, x):
        before = x + 1
        self.before, self.after = weakref.ref(before), tf.nn.relu(before)
        return tf.identity(x)


@pytest.mark.parametrize("kind", ["a layer", "a layer in a region", "no layer"])
def test_nothing_is_kept_for_losses_after_a_call(kind):
    is_region = kind != "a layer"
    layer = Keeps(dtype="float32" if is_region else keras_mp.Policy("mixed_bfloat16"))
    region = keras_mp.autocast("bfloat16") if is_region else contextlib.nullcontext()
    with region:
        x = tf.cast(X, "bfloat16")
        layer.call(x) if kind == "no layer" else layer(x)
    assert layer.before() is None
