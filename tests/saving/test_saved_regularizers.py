"""SavedModels of Keras 2 with regularizers and added losses, which they keep as traces."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, Subclassed

pytestmark = [
    pytest.mark.skipif(IS_KERAS_3, reason="Only Keras 2 saves a model with its functions."),
    pytest.mark.filterwarnings("ignore:tf.keras loads a model from a SavedModel"),
    pytest.mark.filterwarnings("ignore:The `keras.regularizers.serialize"),
]

K = tf.keras
L = K.layers
# Squares of the outputs add up to more than float16 can hold.
X = np.random.default_rng(0).uniform(200, 400, size=[8, 4]).astype("float32")
register = K.utils.register_keras_serializable(package="tests")


class Scale(L.Layer):
    """A layer that nobody finds when it is loaded."""

    def __init__(self, regularizer=None, **kwargs):
        super().__init__(**kwargs)
        self.regularizer = regularizer

    def build(self, shape):
        self.v = self.add_weight(
            name="v", shape=(), initializer="ones", regularizer=self.regularizer
        )

    def call(self, x):
        return x * self.v


class AddsLoss(Scale):
    def call(self, x):
        self.add_loss(0.01 * tf.reduce_sum(x * x))
        return super().call(x)


class AddsLossInTraining(Scale):
    def call(self, x, training=None):
        if training:
            self.add_loss(0.01 * tf.reduce_sum(x * x))
        return super().call(x)


@register
class Known(Scale):
    def get_config(self):
        return {**super().get_config(), "regularizer": self.regularizer}


@register
class OfActivities(K.regularizers.Regularizer):
    def __call__(self, x):
        return tf.reduce_sum(tf.abs(x)) + 0.01 * tf.reduce_sum(x**2)

    def get_config(self):
        return {}


class OfWeights(K.regularizers.Regularizer):
    def __call__(self, x):
        assert x.dtype == tf.float32
        return tf.identity(x)


def square(x):
    return 0.01 * tf.reduce_sum(x * x)


def sequential(layer):
    return K.Sequential([K.Input((4,)), layer])


def nested(layer):
    return K.Sequential([K.Input((4,)), sequential(layer), L.Dense(1)])


def functional(layer):
    inputs = K.Input((4,))
    return K.Model(inputs, L.Dense(1)(layer(inputs)))


def subclassed(layer):
    return Subclassed(layer, L.Dense(1))


def dense(**kwargs):
    orthogonal = K.regularizers.OrthogonalRegularizer(0.1)
    return L.Dense(3, kernel_regularizer=orthogonal, bias_regularizer="l1", **kwargs)


def recurrent():
    cell = L.LSTMCell(3, kernel_regularizer="l2", recurrent_regularizer=OfActivities())
    return K.Sequential([L.Reshape([2, 2]), L.RNN(cell, activity_regularizer="l2")])


LAYERS = {
    "object": lambda: Scale(activity_regularizer=K.regularizers.L2(0.1)),
    "function": lambda: Scale(activity_regularizer=square),
    "lambda": lambda: Scale(activity_regularizer=lambda x: 0.01 * tf.reduce_sum(x * x)),
    "known": lambda: Known(activity_regularizer=K.regularizers.L1L2(0.1, 0.1)),
    "known function": lambda: Known(activity_regularizer=square),
    "registered": lambda: Scale(OfWeights(), activity_regularizer=OfActivities()),
    "dense": lambda: dense(activity_regularizer="l1_l2"),
    "dense function": lambda: dense(activity_regularizer=square),
    "recurrent": recurrent,
    "added": AddsLoss,
    "added in training": AddsLossInTraining,
}


def losses(policy, make, name, path):
    """Losses before saving, after loading, of a loop, and of two steps."""
    K.utils.set_random_seed(1)
    K.backend.clear_session()
    with keras_mp.policy_scope(policy):
        model = make(LAYERS[name]())
        y = np.zeros(model.predict(X, verbose=0).shape, "float32")
        model.compile(K.optimizers.SGD(1e-9), "mse", run_eagerly=True)
        K.models.save_model(model, str(path))
        loaded = K.models.load_model(str(path))
        loaded.compile(K.optimizers.SGD(1e-9), "mse", run_eagerly=True)
        with tf.GradientTape() as tape:
            outputs = loaded(X, training=True)
            added = tf.add_n([tf.cast(loss, tf.float32) for loss in loaded.losses])
            loss = added + tf.reduce_mean(tf.square(tf.cast(outputs, tf.float32)))
        assert all(loss.dtype == tf.float32 for loss in loaded.losses)
        assert None not in tape.gradient(loss, loaded.trainable_variables)
        history = loaded.fit(X, y, epochs=2, verbose=0).history["loss"]
        return [
            model.evaluate(X, y, verbose=0), loaded.evaluate(X, y, verbose=0), float(loss), *history
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "name", "policy"),
    [
        *((sequential, name, "mixed_float16") for name in LAYERS),
        *((nested, name, "mixed_float16") for name in ("object", "function", "added")),
        *((functional, name, "mixed_float16") for name in ("dense", "lambda", "added")),
        *((subclassed, name, "mixed_float16") for name in ("dense", "object", "added")),
        *((subclassed, name, "mixed_bfloat16") for name in ("function", "added")),
    ],
)
def test_losses_after_loading_are_those_of_float32(make, name, policy, tmp_path):
    expected = losses("float32", make, name, tmp_path / "float32")
    found = losses(policy, make, name, tmp_path / "mixed")
    np.testing.assert_allclose(found, expected, rtol=0.02 if policy == "mixed_bfloat16" else 0.004)


@pytest.mark.parametrize("name", ["function", "added"])
def test_a_loaded_model_that_is_saved_again_computes_the_same_losses(name, tmp_path):
    keras_mp.set_global_policy("mixed_float16")
    model = sequential(LAYERS[name]())
    model.compile(loss="mse", run_eagerly=True)
    expected = model.evaluate(X, X, verbose=0)
    for path in (tmp_path / "one", tmp_path / "two"):
        K.models.save_model(model, str(path))
        with keras_mp.policy_scope("float32"):
            model = K.models.load_model(str(path))
        np.testing.assert_allclose(model.evaluate(X, X, verbose=0), expected, rtol=1e-3)
    assert np.isfinite(expected)
