"""A step needs nothing of what attaches to it."""

import pytest
import tensorflow as tf

import keras_mp
from keras_mp.step.outcomes import SkipObserver, SkippedSteps
from tests.common import once

pytestmark = once


@pytest.mark.parametrize("run", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_a_step_is_made_and_skipped_without_reports(run, monkeypatch):
    monkeypatch.setattr(SkippedSteps, "new_report", lambda skipped: SkipObserver())
    optimizer = keras_mp.LossScaleOptimizer(tf.keras.optimizers.SGD(0.25), warn_after_skips=1)
    v, factor = tf.Variable(1.0), tf.Variable(1.0)

    @run
    def step():
        optimizer.minimize(lambda: factor * v**2, [v])

    step()
    factor.assign(float("inf"))
    step()
    assert float(v) == 0.5
    assert bool(optimizer.last_step_skipped)
    assert float(optimizer.loss_scale()) == 2.0**14
