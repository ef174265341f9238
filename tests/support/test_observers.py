"""Observers: what attaches to the core, and to calls of layers, without being imported there."""

import threading

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.support import observers

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
