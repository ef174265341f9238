"""Files of models whose weights are bfloat16, which h5py does not know."""

import copy
import threading

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, assert_all_equal, value
from tests.models import state as state_of
from tests.saving.common import COPIES

pytestmark = [
    pytest.mark.filterwarnings("ignore:The global policy 'bfloat16' keeps variables"),
    pytest.mark.filterwarnings("ignore:Keras 3 has saved"),
]

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
FORMATS = ["model.keras", "model.h5"]


def made(policy):
    keras_mp.set_global_policy(policy)
    layers = [tf.keras.Input((3,)), tf.keras.layers.Dense(4), tf.keras.layers.BatchNormalization()]
    return tf.keras.Sequential([*layers, tf.keras.Sequential([tf.keras.layers.Dense(1)])])


def trained():
    model = made("bfloat16")
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(X, Y, verbose=0)
    return model


def state(model):
    return [*map(value, model.weights), *state_of(model.optimizer)]


def assert_same(found, expected):
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert_all_equal(found, expected)


@pytest.mark.parametrize("file", FORMATS)
def test_a_model_with_its_optimizer(file, tmp_path):
    model = trained()
    assert any(each.dtype == tf.bfloat16 for each in state(model))
    assert_same(copy.deepcopy(model).get_weights(), model.get_weights())
    expected = state(model)
    tf.keras.models.save_model(model, str(tmp_path / file))
    again = tf.keras.models.load_model(str(tmp_path / file))
    assert_same(state(again), expected)
    np.testing.assert_array_equal(again(X), model(X))
    again.fit(X, Y, verbose=0)
    assert np.isfinite(np.concatenate([each.ravel() for each in again.get_weights()])).all()


WEIGHTS = ["m.weights.h5"] if IS_KERAS_3 else ["m.weights.h5", "m.h5"]


@pytest.mark.parametrize("file", WEIGHTS)
@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_weights_load_into_models_of_another_policy(file, policy, tmp_path):
    model, other = made("bfloat16"), made(policy)
    model.save_weights(str(tmp_path / file))
    other.load_weights(str(tmp_path / file))
    for one, expected in zip(other.get_weights(), model.get_weights()):
        np.testing.assert_array_equal(one.astype("float32"), expected.astype("float32"))


@pytest.mark.parametrize("file", FORMATS)
def test_a_layer_of_16_bits_in_a_float32_model(file, tmp_path):
    keras_mp.set_global_policy("float32")
    layer = tf.keras.layers.Dense(4, dtype=keras_mp.Policy("bfloat16"))
    layers = [tf.keras.Input((3,)), layer, tf.keras.layers.Dense(1, dtype="float32")]
    model = tf.keras.Sequential(layers)
    again = COPIES[file.removeprefix("model")](model, tmp_path)
    assert_same(again.get_weights(), model.get_weights())


def test_h5py_is_itself_outside_and_in_other_threads(tmp_path):
    h5py = pytest.importorskip("h5py")
    own, seen = h5py.Group.create_dataset, []
    value = np.asarray(tf.ones([2], tf.bfloat16))

    class Layer(tf.keras.layers.Dense):
        @property
        def weights(self):
            if not seen:
                seen.append(None)
                thread = threading.Thread(target=write, args=["other.h5"])
                thread.start()
                thread.join()
            return super().weights

    def write(name):
        with h5py.File(str(tmp_path / name), "w") as file:
            file["x"] = value
            seen.append(file["x"].dtype)

    keras_mp.set_global_policy("bfloat16")
    model = tf.keras.Sequential([tf.keras.Input((3,)), Layer(1)])
    seen.clear()
    model.save(str(tmp_path / "model.h5"))
    write("later.h5")
    assert seen[1:] == [np.dtype("V2")] * 2
    assert h5py.Group.create_dataset is own
