"""Files written with keras_mp, read by a process that does not have it."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests.common import IS_KERAS_3, ROOT, assert_all_equal, once, run_program, value
from tests.models import compiled_model, training_state
from tests.saving import saving_in_a_loop
from tests.saving.common import load, save

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


# Saving where Keras has a fault.


@once
def test_a_process_that_is_killed_while_it_saves_leaves_a_checkpoint(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.saving.saving_in_a_loop", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"saved\n"
        time.sleep(random.uniform(0, 0.3))  # At another moment in each run.
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()

    model, checkpoint = saving_in_a_loop.make()
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=2)
    assert manager.restore_or_initialize() is not None
    steps = int(value(model.optimizer.iterations)) + int(model.optimizer.steps_skipped)
    assert steps >= 1
    reference, _ = saving_in_a_loop.make()
    for _ in range(steps):
        saving_in_a_loop.step(reference)
    assert_all_equal(training_state(model), training_state(reference))


@pytest.mark.parametrize(
    ("form", "part"),
    [
        *(("checkpoint", ".index"), ("checkpoint", ".data-00000-of-00001")),
        *(("keras", ""), ("h5", ""), ("weights", "")),
    ],
)
def test_a_file_that_is_cut_off_is_an_error_and_changes_nothing(form, part, tmp_path):
    model, _ = saving_in_a_loop.make()
    for _ in range(8):
        saving_in_a_loop.step(model)
    path = save(model, form, str(tmp_path / "model"))
    file = pathlib.Path(path + part)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    again, _ = saving_in_a_loop.make()
    before = training_state(again)
    with pytest.raises((tf.errors.OpError, OSError, ValueError, IndexError)):
        load(path, form, lambda: again)
    assert_all_equal(training_state(again), before)


def test_a_checkpoint_of_another_model_names_what_does_not_fit(tmp_path):
    model, checkpoint = saving_in_a_loop.make()
    path = checkpoint.save(str(tmp_path / "c"))
    narrow = tf.keras.layers.Dense(3, name="narrow")
    other = compiled_model(narrow, inputs=64, optimizer="adam")
    other.optimizer.build(other.trainable_variables)
    with pytest.raises(
        ValueError, match="ncompatible.* shape .64.*(narrow|layer_with_weights)|64, 64"
    ):
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    unscaled = tf.keras.optimizers.Adam()
    unscaled.build(model.trainable_variables)
    status = tf.train.Checkpoint(model=model, optimizer=unscaled).restore(path)
    with pytest.raises(AssertionError, match="loss_scale|steps_skipped"):
        status.assert_consumed()
    status.expect_partial()
    assert isinstance(model.optimizer, keras_mp.LossScaleOptimizer)
