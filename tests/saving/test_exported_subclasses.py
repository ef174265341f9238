"""Signatures of subclassed models: a server sends float32."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp

X = np.full([2, 4], 30, "float32")


class Subclass(tf.keras.Model):
    """A model whose result is too large for float16."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = tf.keras.layers.Dense(
            1,
            dtype=kwargs.get("dtype"),
            kernel_initializer=tf.keras.initializers.Constant(1000.3),
        )

    def call(self, inputs, training=False):
        return self.dense(inputs["x"] if isinstance(inputs, dict) else inputs)


def export(model, folder):
    model.export(folder)


@pytest.mark.parametrize("save", [export, tf.saved_model.save])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16"])
@pytest.mark.filterwarnings("ignore:The global policy 'float16' keeps variables")
def test_a_signature_takes_float32_and_returns_what_predict_returns(policy, save, tmp_path):
    keras_mp.set_global_policy(policy)
    model = Subclass()
    expected = model.predict(X, verbose=0)
    save(model, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    (found,) = loaded.signatures["serving_default"](tf.constant(X)).values()
    np.testing.assert_array_equal(found, expected)
    if save is export:
        np.testing.assert_array_equal(loaded.serve(X), expected)


def of_several_inputs():
    model = Subclass()
    model({"x": X, "other": X})
    return model


def of_an_input_in_16_bits():
    """The program asks for them."""
    inputs = tf.keras.Input((4,), dtype="float16")
    return tf.keras.Model(inputs, Subclass().dense(inputs))


def of_keras_s_own_policy():
    model = Subclass(dtype=tf.keras.mixed_precision.Policy("mixed_float16"))
    model(X)
    return model


@pytest.mark.parametrize(
    ("make", "dtype", "save"),
    [
        (of_several_inputs, tf.float32, export),
        (of_several_inputs, tf.float32, tf.saved_model.save),
        (of_an_input_in_16_bits, tf.float16, export),
        (of_an_input_in_16_bits, tf.float16, tf.saved_model.save),
        (of_keras_s_own_policy, tf.float16, export),
    ],
)
def test_what_a_signature_takes(make, dtype, save, tmp_path):
    with keras_mp.policy_scope("mixed_float16"):
        model = make()
    save(model, str(tmp_path / "model"))
    signature = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    specs = signature.structured_input_signature[1].values()
    assert {spec.dtype for spec in specs} == {dtype}
