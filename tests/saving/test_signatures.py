"""Models that are exported, or saved with their functions: a server sends and gets float32."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, Subclassed

pytestmark = [
    pytest.mark.filterwarnings("ignore:The global policy 'float16' keeps variables"),
    pytest.mark.filterwarnings("ignore:tf.keras loads a model from a SavedModel"),
]
keras_2_only = pytest.mark.skipif(IS_KERAS_3, reason="Only Keras 2 saves a model so.")

X = np.full([2, 4], 30, "float32")


def dense(**kwargs):
    """A layer whose result is too large for float16."""
    return tf.keras.layers.Dense(
        1, kernel_initializer=tf.keras.initializers.Constant(1000.3), **kwargs
    )


def nested():
    identity = tf.keras.layers.Dense(4, kernel_initializer="identity")
    inner = tf.keras.Sequential([tf.keras.Input((4,)), identity])
    return tf.keras.Sequential([tf.keras.Input((4,)), inner, dense()])


def export(model, folder):
    model.export(folder)


SAVES = {"export": export, "TensorFlow": tf.saved_model.save}
OF_KERAS_2 = {"Keras": tf.keras.models.save_model, "TensorFlow": tf.saved_model.save}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16"])
def test_a_signature_takes_float32_and_returns_what_predict_returns(policy, save, tmp_path):
    keras_mp.set_global_policy(policy)
    model = Subclassed(dense())
    expected = model.predict(X, verbose=0)
    SAVES[save](model, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    (found,) = loaded.signatures["serving_default"](tf.constant(X)).values()
    np.testing.assert_array_equal(found, expected)
    if save == "export":
        np.testing.assert_array_equal(loaded.serve(X), expected)


class OfADict(Subclassed):
    def call(self, inputs):
        self.add_loss(tf.reduce_sum(inputs["x"]))
        return {"y": super().call(inputs["x"])}


def of_several_inputs():
    model = OfADict(dense())
    model({"x": X, "other": X})
    return model


def of_an_input_in_16_bits():
    """The program asks for them."""
    inputs = tf.keras.Input((4,), dtype="float16")
    return tf.keras.Model(inputs, dense()(inputs))


def of_keras_s_own_policy():
    policy = tf.keras.mixed_precision.Policy("mixed_float16")
    model = Subclassed(dense(dtype=policy), dtype=policy)
    model(X)
    return model


@pytest.mark.parametrize(
    ("make", "dtype", "save"),
    [
        *((of_several_inputs, tf.float32, save) for save in SAVES),
        *((of_an_input_in_16_bits, tf.float16, save) for save in SAVES),
        (of_keras_s_own_policy, tf.float16, "export"),
    ],
)
def test_what_a_signature_takes(make, dtype, save, tmp_path):
    with keras_mp.policy_scope("mixed_float16"):
        model = make()
    SAVES[save](model, str(tmp_path / "model"))
    signature = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    specs = signature.structured_input_signature[1].values()
    assert {spec.dtype for spec in specs} == {dtype}


@keras_2_only
@pytest.mark.parametrize("save", OF_KERAS_2)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_loaded_model_returns_what_predict_returns(save, policy, tmp_path):
    save = OF_KERAS_2[save]
    keras_mp.set_global_policy(policy)
    model = nested()
    expected = model.predict(X, verbose=0)
    assert expected[0, 0] > 65_504
    save(model, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    (served,) = loaded.signatures["serving_default"](tf.constant(X)).values()
    for found in (served, loaded(X), loaded(X, training=False), model.predict(X, verbose=0)):
        np.testing.assert_array_equal(found, expected)
    assert served.dtype == loaded(X, training=True).dtype == tf.float32
    tf.keras.models.save_model(model, str(tmp_path / "model"))
    with keras_mp.policy_scope("float32"):
        again = tf.keras.models.load_model(str(tmp_path / "model"))
    save(again, str(tmp_path / "again"))
    np.testing.assert_array_equal(tf.saved_model.load(str(tmp_path / "again"))(X), expected)


@keras_2_only
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_loaded_subclassed_model_is_called_with_float32(policy, tmp_path):
    module = tf.Module()
    with keras_mp.policy_scope(policy):
        module.model = OfADict(tf.keras.Sequential([dense()]))
        expected = module.model({"x": X})["y"]
    assert expected[0, 0] > 65_504
    assert np.isfinite(float(*module.model.losses))
    tf.saved_model.save(module, str(tmp_path / "model"))
    found = tf.saved_model.load(str(tmp_path / "model")).model({"x": tf.constant(X)})["y"]
    assert found.dtype == tf.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)
