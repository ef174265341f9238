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


@pytest.mark.parametrize("save", [export, tf.saved_model.save])
def test_several_inputs(save, tmp_path):
    keras_mp.set_global_policy("mixed_float16")
    model = Subclass()
    model({"x": X, "other": X})
    save(model, str(tmp_path / "model"))
    signature = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    specs = signature.structured_input_signature[1].values()
    assert {spec.dtype for spec in specs} == {tf.float32}


@pytest.mark.parametrize("save", [export, tf.saved_model.save])
def test_an_input_for_which_the_program_asks_for_16_bits_keeps_them(save, tmp_path):
    keras_mp.set_global_policy("mixed_float16")
    inputs = tf.keras.Input((4,), dtype="float16")
    save(tf.keras.Model(inputs, Subclass().dense(inputs)), str(tmp_path / "model"))
    signature = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    (spec,) = signature.structured_input_signature[1].values()
    assert spec.dtype == tf.float16


def test_models_with_keras_s_own_policies_are_exported_as_ever(tmp_path):
    keras_mp.Policy("mixed_float16")  # installs what there is to install
    policy = tf.keras.mixed_precision.Policy("mixed_float16")
    model = Subclass(dtype=policy)
    model(X)
    export(model, str(tmp_path / "model"))
    signature = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    (spec,) = signature.structured_input_signature[1].values()
    assert spec.dtype == tf.float16
