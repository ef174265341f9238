"""Processes that die while they save, files that are cut off, checkpoints of other models."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf

import keras_mp
from tests.common import assert_all_equal, compiled_model, once, training_state, value
from tests.saving import saving_in_a_loop
from tests.saving.common import load, save

ROOT = pathlib.Path(__file__).parent.parent.parent


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
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
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
