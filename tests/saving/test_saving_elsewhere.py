"""Files written with keras_mp, read by a process that does not have it."""

import json

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, run_program

READER = """
import json, sys
sys.modules["keras_mp"] = None  # An import of it fails, as where it is not installed.
import numpy as np
import tensorflow as tf

folder, said = sys.argv[1], {}
x = np.load(folder + "/x.npy")
exported = tf.saved_model.load(folder + "/export")
said["export"] = exported.serve(x).numpy().tolist()
module = tf.saved_model.load(folder + "/module")
with tf.GradientTape() as tape:
    y = module(tf.constant([1.0, 1.0], tf.float16))
gradient = tape.gradient(y, module.v)
said["module"] = [y.numpy().tolist(), gradient.dtype.name, gradient.numpy().tolist()]
for file in ("model.keras", "model.h5"):
    model = tf.keras.models.load_model(folder + "/" + file, compile=False)
    said[file] = model.predict(x, verbose=0).tolist()
try:
    tf.keras.models.load_model(folder + "/model.keras")
except Exception as error:
    said["error"] = str(error)
print(json.dumps(said))
"""


class Module(tf.Module):
    def __init__(self):
        self.v = keras_mp.autocast_variable(tf.Variable([1.0, 2.0]))
        self.w = keras_mp.autocast_variable(tf.Variable([[3.0, 4.0]]))

    @tf.function(input_signature=[tf.TensorSpec([2], tf.float16)])
    def __call__(self, x):
        with keras_mp.autocast_scope("float16"):
            return x * self.v * self.v + self.w[0] + self.w[0]


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_inference_needs_no_keras_mp(tmp_path):
    keras_mp.set_global_policy("mixed_float16")
    inner = [tf.keras.Input((3,)), tf.keras.layers.BatchNormalization()]
    layers = [
        tf.keras.Input((4,)),
        tf.keras.layers.Dense(3, activation="relu"),
        tf.keras.Sequential(inner),
        tf.keras.layers.Dense(2, activation="softmax", dtype="float32"),
    ]
    model = tf.keras.Sequential(layers)
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    x = np.ones([8, 4], "float32")
    model.fit(x, np.full([8, 2], 0.5), verbose=0)
    np.save(str(tmp_path / "x.npy"), x)
    model.save(str(tmp_path / "model.keras"))
    model.save(str(tmp_path / "model.h5"))
    model.export(str(tmp_path / "export"))
    tf.saved_model.save(Module(), str(tmp_path / "module"))
    said = json.loads(run_program("-c", READER, str(tmp_path)).splitlines()[-1])
    for form in ("export", "model.keras", "model.h5"):
        np.testing.assert_allclose(said[form], model.predict(x, verbose=0), rtol=1e-6)
    assert said["module"] == [[7.0, 12.0], "float32", [2.0, 4.0]]
    assert "LossScaleOptimizer" in said["error"]
    assert "keras_mp" in said["error"]


@pytest.mark.skipif(not IS_KERAS_3, reason="Keras 2 reads the config of any policy.")
def test_configs_of_a_policy_are_stock_where_its_loss_scale_is_automatic():
    stock = tf.keras.dtype_policies.DTypePolicy("mixed_float16")
    ours = tf.keras.dtype_policies.serialize(keras_mp.Policy("mixed_float16"))
    theirs = tf.keras.dtype_policies.serialize(stock)
    assert (ours["class_name"], ours["config"]) == (theirs["class_name"], theirs["config"])
    assert type(tf.keras.dtype_policies.deserialize(ours)) is keras_mp.Policy
    assert type(tf.keras.dtype_policies.deserialize(theirs)) is type(stock)
