"""SavedModels of Keras 2, which has traced its layers in them."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3

pytestmark = [
    pytest.mark.skipif(IS_KERAS_3, reason="Only Keras 2 saves a model with its functions."),
    pytest.mark.filterwarnings("ignore:tf.keras loads a model from a SavedModel"),
]

X = np.full([2, 4], 30, "float32")


@pytest.mark.parametrize("save", [tf.keras.models.save_model, tf.saved_model.save])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_signature_returns_what_predict_returns(save, policy, tmp_path):
    keras_mp.set_global_policy(policy)
    initializer = tf.keras.initializers.Constant(1000.3)
    inner = tf.keras.Sequential(
        [tf.keras.Input((4,)), tf.keras.layers.Dense(4, kernel_initializer="identity")]
    )
    layers = [tf.keras.Input((4,)), inner, tf.keras.layers.Dense(1, kernel_initializer=initializer)]
    model = tf.keras.Sequential(layers)
    expected = model.predict(X, verbose=0)
    assert expected[0, 0] > 65_504
    save(model, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    (found,) = loaded.signatures["serving_default"](tf.constant(X)).values()
    assert found.dtype == tf.float32
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
    for found in (loaded(X), loaded(X, training=False)):
        np.testing.assert_array_equal(found, expected)
    assert loaded(X, training=True).dtype == tf.float32
    tf.keras.models.save_model(model, str(tmp_path / "model"))
    with keras_mp.policy_scope("float32"):
        again = tf.keras.models.load_model(str(tmp_path / "model"))
    save(again, str(tmp_path / "again"))
    np.testing.assert_array_equal(tf.saved_model.load(str(tmp_path / "again"))(X), expected)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_loaded_subclassed_model_is_called_with_float32(policy, tmp_path):
    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            constant = tf.keras.initializers.Constant(1000.3)
            self.inner = tf.keras.Sequential(
                [tf.keras.layers.Dense(1, kernel_initializer=constant)]
            )

        def call(self, inputs):
            self.add_loss(tf.reduce_sum(inputs["x"]))
            return {"y": self.inner(inputs["x"])}

    keras_mp.set_global_policy(policy)
    module = tf.Module()
    module.model = Model()
    expected = module.model({"x": X})["y"]
    assert expected[0, 0] > 65_504
    tf.saved_model.save(module, str(tmp_path / "model"))
    found = tf.saved_model.load(str(tmp_path / "model")).model({"x": tf.constant(X)})["y"]
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    (loss,) = module.model.losses
    assert np.isfinite(float(loss))
