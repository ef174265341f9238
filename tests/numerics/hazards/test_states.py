"""States that layers keep: counts and sums that stop in 16 bits, averages that stick."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from keras_mp.models.layer_paths import native_variable

L = tf.keras.layers
X = np.ones([8, 4], "float32")
STEPS = 400


class Keeps(L.Layer):
    """A layer that keeps something about its inputs, whose mean is 1."""

    def __init__(self, how: str, of: str | None = None, **kwargs: Any) -> None:
        super().__init__(name="keeps", **kwargs)
        self.how, self.of = how, of

    def build(self, input_shape: Any) -> None:
        dtype = {} if self.of is None else {"dtype": self.of}
        self.kept = self.add_weight(
            shape=[], initializer="zeros", trainable=False, name="kept", **dtype
        )
        self.built = True

    def call(self, x: tf.Tensor) -> tf.Tensor:
        mean, kept = tf.reduce_mean(x), self.kept
        if self.how == "adds":
            kept.assign_add(1.0)
        elif self.how == "takes away":
            kept.assign_sub(1.0)
        elif self.how == "is one more":
            kept.assign(kept + 1.0)
        elif self.how == "is one less":
            kept.assign(kept - 1.0)
        elif self.how == "adds what it sees":
            kept.assign(tf.reduce_sum(x) + kept)
        elif self.how == "moves a little":
            kept.assign(kept * 0.99 + mean * 0.01)
        elif self.how == "moves by a difference":
            kept.assign(kept + 0.01 * (mean - kept))
        elif self.how == "moves far":
            kept.assign(0.5 * kept + 0.5 * mean)
        elif self.how == "remembers":
            kept.assign(mean)
        elif self.how == "counts to one":
            kept.assign(tf.minimum(kept + 1.0, tf.ones_like(kept)))
        elif self.how == "adds both signs":
            kept.assign(kept + tf.reduce_sum(x * 0))
        return x


SUM, AVERAGE = "a sum that stops in 16 bits", "an average that sticks in 16 bits"
# What is kept after all steps where nothing is lost, and what `check` says of it.
WAYS: dict[str, tuple[float, str | None]] = {
    "adds": (STEPS, SUM),
    "takes away": (-STEPS, SUM),
    "is one more": (STEPS, SUM),
    "is one less": (-STEPS, SUM),
    "adds what it sees": (32 * STEPS, SUM),
    "moves a little": (1 - 0.99**STEPS, AVERAGE),
    "moves by a difference": (1 - 0.99**STEPS, AVERAGE),
    "moves far": (1, None),
    "remembers": (1, None),
    "counts to one": (1, None),
    "adds both signs": (0, None),
}
# Keras's own policy, and the one of ours that keeps variables in 16 bits.
POLICIES = {
    "Keras's": lambda: tf.keras.mixed_precision.Policy("mixed_bfloat16"),
    "16 bits": lambda: keras_mp.Policy("bfloat16"),
}


def model_with(how: str, policy: Any, of: str | None = None) -> Any:
    layers = [Keeps(how, of, dtype=policy), L.Dense(1, dtype=policy)]
    model = tf.keras.Sequential([tf.keras.Input([4]), *layers])
    model.compile(keras_mp.MasterWeightOptimizer("sgd"), "mse")
    return model


def trained(model: Any) -> float:
    """What the layer has kept after the steps."""
    dataset = tf.data.Dataset.from_tensors((X, X[:, :1])).repeat(STEPS)
    model.fit(dataset, verbose=0, shuffle=False)
    return float(native_variable(model.layers[0].kept).numpy())


def about_states(model: Any) -> dict[str, Any]:
    found = keras_mp.numerics.check(model, (X, X[:, :1])).findings
    return {each.hazard: each for each in found if each.hazard in (SUM, AVERAGE)}


@pytest.mark.parametrize(
    ("how", "policy"),
    [*((how, "Keras's") for how in WAYS), ("adds", "16 bits"), ("moves a little", "16 bits")],
)
def test_what_stops_or_sticks_is_a_finding(how, policy):
    exact, hazard = WAYS[how]
    model = model_with(how, POLICIES[policy]())
    found = about_states(model)
    kept = trained(model)
    is_lost = abs(kept - exact) > 0.02 * max(abs(exact), 1)
    assert list(found) == [hazard] * is_lost
    for each in found.values():
        assert each.where == "keeps"
        assert each.line.file == __file__
    if hazard == SUM and is_lost:
        assert f"from {abs(kept):,.0f} on" in found[SUM].why


@pytest.mark.parametrize("how", [how for how, (_, hazard) in WAYS.items() if hazard])
def test_the_cure_and_a_mixed_policy_keep_everything(how):
    exact, _ = WAYS[how]
    for policy, of in (("bfloat16", "float32"), ("mixed_bfloat16", None)):
        model = model_with(how, keras_mp.Policy(policy), of)
        assert about_states(model) == {}
        np.testing.assert_allclose(trained(model), exact, rtol=1e-3)


class Raw(L.Layer):
    """A layer with variables that Keras 3 does not know of, and one that is only written."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.number, self.several = tf.Variable(0.0), {"a": [tf.Variable(1.0)]}
        self.module = tf.Module()
        self.module.inside = tf.Variable(2.0)

    def build(self, input_shape: Any) -> None:
        self.written = self.add_weight(shape=[], initializer="zeros", trainable=False)
        self.built = True

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.written.assign_add(1.0)
        for variable in self.raw():
            variable.assign_add(1.0)
        return x

    def raw(self) -> list[tf.Variable]:
        return [self.number, *self.several["a"], self.module.inside]


@pytest.mark.parametrize("name", ["bfloat16", "mixed_bfloat16"])
def test_tools_leave_what_layers_have_kept(name):
    policy = keras_mp.Policy(name)
    layer = Raw(dtype=policy)
    model = tf.keras.Sequential([tf.keras.Input([4]), layer, L.Dense(1, dtype=policy)])
    model.compile(keras_mp.MasterWeightOptimizer("sgd"), "mse")
    keras_mp.numerics.check(model, (X, X[:, :1]))
    keras_mp.numerics.record(model, X, X[:, :1])
    assert [variable.numpy() for variable in layer.raw()] == [0.0, 1.0, 2.0]
    assert float(native_variable(layer.written).numpy()) == 0
