"""Observers: what attaches to the core, and to calls of layers, without being imported there."""

import threading

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.hooks import observers
from keras_mp.layer_calls import layer_observers
from tests.common import IS_KERAS_3

K = tf.keras


def has_optimizer(model):
    return getattr(model, "optimizer", None) is not None


class Notes(observers.Observer):
    """Notes each call."""

    def __init__(self):
        self.calls = []

    def policy_was_made(self, policy):
        self.calls.append(("policy_was_made", policy.name))

    def policy_is_set(self, policy):
        self.calls.append(("policy_is_set", policy.name))

    def model_is_compiled(self, model):
        self.calls.append(("model_is_compiled", model.name, has_optimizer(model)))

    def model_was_compiled(self, model):
        self.calls.append(("model_was_compiled", model.name, has_optimizer(model)))

    def scaler_was_made(self):
        self.calls.append(("scaler_was_made",))

    def step_begins(self):
        self.calls.append(("step_begins",))

    def gradients(self, pairs, divisor, scaled_by):
        found = [float(tf.reduce_sum(gradient)) for gradient, _ in pairs]
        self.calls.append(("gradients", found, divisor and float(divisor)))


@pytest.fixture
def notes():
    notes = Notes()
    with observers.attached(notes):
        yield notes


def test_an_observer_sees_policies_models_and_steps(notes):
    keras_mp.Policy("mixed_bfloat16")
    keras_mp.set_global_policy("mixed_float16")
    keras_mp.set_global_policy("float32")
    model = K.Sequential(
        [K.layers.Dense(1, dtype=keras_mp.Policy("mixed_float16"))], name="watched"
    )
    model.compile(keras_mp.LossScaleOptimizer(K.optimizers.SGD()), "mse")
    assert [call for call in notes.calls if call[0] != "policy_was_made"] == [
        ("policy_is_set", "mixed_float16"),
        ("policy_is_set", "float32"),
        ("scaler_was_made",),
        ("model_is_compiled", "watched", False),
        ("model_was_compiled", "watched", True),
    ]
    made = [name for event, name in notes.calls[:2] if event == "policy_was_made"]
    assert made == ["mixed_bfloat16", "mixed_float16"]


@pytest.mark.parametrize("make", [keras_mp.LossScaleOptimizer, lambda _, s: keras_mp.GradScaler(s)])
def test_an_observer_sees_scaled_gradients_and_their_divisor(make, notes):
    scale, weight = keras_mp.FixedLossScale(4.0), tf.Variable(2.0)
    sgd = K.optimizers.SGD()
    scaler = make(sgd, scale)
    if isinstance(scaler, keras_mp.GradScaler):
        scaler.scale(weight * 3.0)
        scaler.step(sgd, [(tf.constant(12.0), weight)])
    else:
        scaler.minimize(lambda: weight * 3.0, [weight])
    assert notes.calls[0] == ("scaler_was_made",)
    assert notes.calls[-1] == ("gradients", [12.0], 4.0)


def test_other_threads_do_not_see_it(notes):
    thread = threading.Thread(target=lambda: keras_mp.Policy("mixed_float16"))
    thread.start()
    thread.join()
    assert notes.calls == []


def test_what_an_observer_raises_the_call_raises_and_nothing_is_set(notes):
    class Refuses(observers.Observer):
        def policy_is_set(self, policy):
            raise ValueError(f"not {policy.name}")

    with observers.attached(Refuses()), pytest.raises(ValueError, match="not mixed_float16"):
        keras_mp.set_global_policy("mixed_float16")
    assert keras_mp.global_policy().name == "float32"
    # The last one comes after those that were there.
    events = ("policy_was_made", "policy_is_set")
    assert notes.calls == [(event, "mixed_float16") for event in events]


class LayerNotes(layer_observers.LayerObserver):
    def __init__(self):
        self.seen = []

    def inputs(self, call):
        self.seen.append(("inputs", call.path, call.args[0].dtype.name, call.kwargs))

    def outputs(self, call, outputs):
        self.seen.append(("outputs", call.path, outputs.dtype.name))
        return outputs + 1

    def failed(self, call):
        self.seen.append(("failed", call.path, call.layer.name))


class Positive(K.layers.Layer):
    def call(self, x, limit=0):
        # Keras 3 lets AutoGraph convert no layer.
        if IS_KERAS_3 or tf.reduce_sum(x) > limit:
            return x
        return tf.zeros_like(x)


@pytest.mark.parametrize("in_graph", [False, True])
def test_an_observer_sees_cast_inputs_and_may_replace_outputs(in_graph):
    layer, notes = Positive(dtype="mixed_float16"), LayerNotes()
    layer.build([2])

    def call(x):
        with layer_observers.attached(notes, [("some/path", layer)]):
            return layer(x, limit=1)

    returned = (tf.function(call) if in_graph else call)(tf.constant([1.0, 2.0]))
    assert returned.numpy().tolist() == [2, 3]
    assert notes.seen == [
        ("inputs", "some/path", "float16", {"limit": 1}),
        ("outputs", "some/path", "float16"),
    ]
    layer(tf.ones([2]))
    assert len(notes.seen) == 2
    assert "call" not in vars(layer)


def test_an_observer_is_told_of_a_layer_that_fails():
    class Failing(K.layers.Layer):
        def call(self, x):
            raise ValueError("it fails")

    layer, notes = Failing(name="failing"), LayerNotes()
    with (
        pytest.raises(ValueError, match="it fails"),
        layer_observers.attached(notes, [("path", layer)]),
    ):
        layer(tf.ones([2]))
    assert [each[0] for each in notes.seen] == ["inputs", "failed"]
