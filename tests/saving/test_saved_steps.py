"""Functions in a SavedModel that make steps, with everything that scales a loss."""

import numpy as np
import pytest
import tensorflow as tf

import keras_mp
from tests import steps
from tests.common import FAMILIES, make_optimizer


class Trainer(tf.Module):
    """Makes steps by one of `steps.KINDS`."""

    def __init__(self, kind, family, wrap):
        super().__init__()
        self.v = tf.Variable([1.0, 2.0])
        step = steps.with_scale(
            *(kind, "dynamic", self.loss, [self.v]),
            make=lambda rate: wrap(make_optimizer(family, rate)),
        )
        self.make_step, self.scales = step, step.scales
        if kind == "scaler":  # which does not know the optimizer
            self.optimizer = step.optimizer

    def loss(self, factor):
        return tf.reduce_sum(self.v) * factor

    @tf.function(input_signature=[tf.TensorSpec([])])
    def step(self, factor):
        self.make_step(factor)
        return self.v.read_value()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["minimize", "rfc", "scaler", "tensorflow 1", "keras_3"])
def test_a_module_with_a_train_step_is_saved(kind, family, tmp_path):
    wrap = keras_mp.OptimizerWrapper if kind == "rfc" else lambda optimizer: optimizer
    trainer = Trainer(kind, family, wrap)
    trainer.step(tf.constant(1.0))
    tf.saved_model.save(trainer, str(tmp_path / "trainer"))
    loaded = tf.saved_model.load(str(tmp_path / "trainer"))
    for factor in (2.0, np.nan, 0.5):
        expected = trainer.step(tf.constant(factor))
        np.testing.assert_array_equal(loaded.step(tf.constant(factor)), expected)
    assert np.isfinite(expected).all()
    assert int(trainer.scales.steps_skipped) == 1
    if kind in steps.WAYS:
        assert ("legacy" in type(loaded.scales).__module__) == family.startswith("legacy")
    # What only functions use is no part of a checkpoint.
    checkpoint = tf.train.Checkpoint(optimizer=trainer.scales).save(str(tmp_path / "checkpoint"))
    keys = " ".join(key for key, _ in tf.train.list_variables(checkpoint))
    assert "loss_scale" in keys
    assert not any(word in keys for word in ("made", "report", "losses"))
