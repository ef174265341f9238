"""A function that makes variables in its first call is traced once."""

import contextlib
import functools

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.support import new_variables
from tests import common

K = tf.keras
OPTIMIZERS = [K.optimizers.Adam, functools.partial(K.optimizers.SGD, momentum=0.9)]


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, 6)).astype("float32"), rng.normal(size=(8, 1)).astype("float32")


class Network(K.Model):
    """Counts how often it is traced."""

    traces = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = K.Sequential([K.Input((6,)), K.layers.Dense(4), K.layers.Dense(1)])

    def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        self.traces += 1
        return self.net(x, training=training)


class OwnStep(Network):
    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        variables = self.net.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}


def _fitted(cls: type, policy: str, *, optimizer, build=lambda _: None, **kwargs) -> Network:
    x, y = _data()
    with keras_mp.policy_scope(policy):
        K.utils.set_random_seed(1)
        model = cls()
        model(x)
        model.traces = 0
        build(model.trainable_variables)
        model.compile(optimizer, "mse", **kwargs)
        model.fit(x, y, epochs=3, verbose=0)
    return model


@pytest.mark.parametrize(
    ("policy", "cls", "make"),
    common.pairs(["mixed_float16", "mixed_bfloat16"], [Network, OwnStep], OPTIMIZERS),
)
def test_a_step_is_traced_once(policy, cls, make, monkeypatch):
    # Keras 3 makes metrics in the graph.
    metrics = {"metrics": ["mae"]} if cls is Network and not common.IS_KERAS_3 else {}
    model = _fitted(cls, policy, optimizer=make(0.1), **metrics)
    assert model.traces == 1
    # TensorFlow's way: what is made while the step is traced is found by a second trace.
    monkeypatch.setattr(new_variables, "made_at_once", contextlib.nullcontext)
    control = _fitted(cls, policy, optimizer=make(0.1), **metrics)
    assert control.traces == 2
    for weight, other in zip(model.get_weights(), control.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)


@pytest.mark.skipif(common.IS_KERAS_3, reason="Keras 3 counts steps.")
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, keras_mp.LossScaleOptimizer])
def test_nadam_of_keras_2_counts_its_traces_as_without_us(wrap, monkeypatch):
    def fitted() -> Network:
        return _fitted(Network, "mixed_bfloat16", optimizer=wrap(K.optimizers.Nadam(0.1)))

    model = fitted()
    monkeypatch.setattr(new_variables, "made_at_once", contextlib.nullcontext)
    for weight, other in zip(model.get_weights(), fitted().get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)


@pytest.mark.skipif(not common.IS_KERAS_3, reason="Keras 2 has no such optimizer.")
def test_what_an_optimizer_assigns_while_it_is_built_is_no_part_of_the_step():
    # Its momentum starts at the weights.
    make = getattr(K.optimizers, "ScheduleFreeAdamW", None)
    if make is None:
        pytest.skip("This Keras has no such optimizer.")
    model = _fitted(OwnStep, "mixed_float16", optimizer=make(0.1))
    built = make(0.1)
    control = _fitted(OwnStep, "mixed_float16", optimizer=built, build=built.build)
    assert model.traces == control.traces == 1
    for weight, other in zip(model.get_weights(), control.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)


@pytest.mark.parametrize("mode", ["function", "jit", "replicas"])
def test_a_function_with_a_wrapper_is_traced_once(mode):
    replicas = 2 if mode == "replicas" else 1
    strategy = common.mirrored(replicas)
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
        optimizer = keras_mp.LossScaleOptimizer(K.optimizers.Adam(0.1))
    traces = []

    def update() -> None:
        traces.append(None)
        gradients = [optimizer.loss_scale() * tf.constant([0.1, -0.1])]
        optimizer.apply_gradients(zip(gradients, [variable]), scaled=True)

    step = tf.function(lambda: strategy.run(update), jit_compile=mode == "jit")
    for _ in range(2):
        step()
    assert len(traces) == replicas
    np.testing.assert_allclose(variable.numpy(), [0.8, 2.2], atol=1e-4)
